//! Which pages of a place hold data, told by the page table of the VM's process and by the file behind it. Reads
//! no page that isn't there, so none is allocated by asking.

#![expect(unsafe_code, reason = "mincore on our own mapping")]

use crate::extent::Extents;
use crate::mapping::Mapping;
use crate::pagemap::{Pagemap, Query, Stretch, category};
use crate::process::Place;
use crate::{PAGE, Run, Store};
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

impl Place {
    /// Calls `each` with the pages of `run` that private memory may hold: those mapped, but for the shared zero
    /// page, and those swapped out. A page under migration looks swapped out, and so does a hole once it is
    /// protected: to ask after protecting calls all those holes data, which is costly but never wrong.
    pub(crate) fn resident(
        &self,
        pagemap: &Pagemap,
        run: Run,
        room: &mut [Stretch],
        mut each: impl FnMut(Run),
    ) -> io::Result<()> {
        if self.mapping.is_some() {
            return Ok(());
        }
        let addresses = self.host(run.first)..self.host(run.end());
        pagemap.scan(addresses, RESIDENT, room, |stretch| each(self.run_of(stretch)))?;
        Ok(())
    }

    /// Calls `each` with the pages of `run` that hold data in the file behind the place.
    pub(crate) fn stored(
        &self,
        pagemap: &Pagemap,
        run: Run,
        room: &mut [Stretch],
        mut each: impl FnMut(Run),
    ) -> io::Result<()> {
        let Some((file, store)) = self.file() else { return Ok(()) };
        match (store, &self.mapping) {
            (Store::Hugetlb { page_bytes }, _) => self.huge(pagemap, file, page_bytes, run, room, &mut each),
            (Store::Shmem, Some(mapping)) => self.extents_or_cache(file, mapping, run, &mut each),
            _ => self.extents(file, run, u64::MAX, &mut each).map(|_| ()),
        }
    }

    /// Data as the file system tells. Stops after `stretches_max`, and says which page comes next.
    fn extents(
        &self,
        file: &fs::File,
        run: Run,
        stretches_max: u64,
        each: &mut impl FnMut(Run),
    ) -> io::Result<u64> {
        let offset = |page: u64| self.offset() + (page - self.region.first_page) * PAGE as u64;
        let mut extents = Extents::new(file, offset(run.first)..offset(run.end()));
        for _ in 0..stretches_max {
            let Some(data) = extents.next() else { return Ok(run.end()) };
            let data = data?;
            let page = |offset: u64| self.region.first_page + (offset - self.offset()) / PAGE as u64;
            each(Run { first: page(data.start), count: (data.end - data.start) / PAGE as u64 });
        }
        Ok(self.region.first_page + (extents.from() - self.offset()) / PAGE as u64)
    }

    /// Shared memory in many small pieces is told faster by the page cache than hole by hole. But the cache does
    /// not know what is swapped out.
    fn extents_or_cache(
        &self,
        file: &fs::File,
        mapping: &Mapping,
        run: Run,
        each: &mut impl FnMut(Run),
    ) -> io::Result<()> {
        let mut first = run.first;
        while first < run.end() {
            let piece = Run { first, count: PIECE_PAGES.min(run.end() - first) };
            first = self.extents(file, piece, PIECE_STRETCHES, each)?;
            if first < piece.end() {
                let rest = Run { first, count: piece.end() - first };
                if swap_is_on()? || !self.cached(mapping, rest, each)? {
                    self.extents(file, rest, u64::MAX, each)?;
                }
                first = piece.end();
            }
        }
        Ok(())
    }

    /// Data as our own mapping sees it in the page cache. False if swap was switched on meanwhile.
    fn cached(&self, mapping: &Mapping, run: Run, each: &mut impl FnMut(Run)) -> io::Result<bool> {
        let mut cached = vec![0u8; run.count as usize];
        let at = mapping.page(run.first - self.region.first_page).as_ptr();
        // SAFETY: `run` lies inside the mapping, and there is a byte for each of its pages.
        let rc = unsafe { libc::mincore(at.cast(), run.count as usize * PAGE, cached.as_mut_ptr()) };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        if swap_is_on()? {
            return Ok(false);
        }
        for (page, _) in (run.first..).zip(&cached).filter(|(_, cached)| **cached & 1 == 1) {
            each(Run { first: page, count: 1 });
        }
        Ok(true)
    }

    /// Huge pages: what the VM has mapped, and what it hasn't but the file has. hugetlbfs shows no holes, but
    /// reading one through the descriptor gives zeros and allocates nothing.
    fn huge(
        &self,
        pagemap: &Pagemap,
        file: &fs::File,
        page_bytes: u64,
        run: Run,
        room: &mut [Stretch],
        each: &mut impl FnMut(Run),
    ) -> io::Result<()> {
        let pages = page_bytes / PAGE as u64;
        let (mut unseen, mut next, mut present) = (Vec::new(), run.first, 0);
        let addresses = self.host(run.first)..self.host(run.end()).next_multiple_of(page_bytes);
        pagemap.scan(addresses, PRESENT, room, |stretch| {
            let here = self.run_of(stretch);
            unseen.push(Run { first: next, count: here.first.max(next) - next });
            next = here.end();
            present += here.count;
            each(Run { first: here.first, count: here.end().min(run.end()) - here.first });
        })?;
        unseen.push(Run { first: next, count: run.end().saturating_sub(next) });
        if present * PAGE as u64 >= file.metadata()?.blocks() * 512 {
            return Ok(());
        }
        for gap in unseen {
            for first in (gap.first..gap.end()).step_by(pages as usize) {
                let page = Run { first, count: pages.min(run.end() - first) };
                if self.reads_data(file, page)? {
                    each(page);
                }
            }
        }
        Ok(())
    }

    fn reads_data(&self, file: &fs::File, run: Run) -> io::Result<bool> {
        let mut bytes = [0; PAGE];
        for page in run.first..run.end() {
            let offset = self.offset() + (page - self.region.first_page) * PAGE as u64;
            file.read_exact_at(&mut bytes, offset)?;
            if bytes.iter().any(|&byte| byte != 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The pages of the block at these addresses.
    pub(crate) fn run_of(&self, stretch: Stretch) -> Run {
        let page = |address: u64| self.region.first_page + (address - self.region.host) / PAGE as u64;
        Run { first: page(stretch.start), count: (stretch.end - stretch.start) / PAGE as u64 }
    }
}

fn swap_is_on() -> io::Result<bool> {
    Ok(fs::read_to_string("/proc/swaps")?.lines().count() > 1)
}

/// Mapped but not the zero page, or swapped out: with ZERO flipped, one of PRESENT and SWAPPED and no ZERO.
const RESIDENT: Query = Query {
    protect: false,
    inverted: category::ZERO,
    all: category::ZERO,
    any: category::PRESENT | category::SWAPPED,
    report: 0,
};

const PRESENT: Query = Query { protect: false, inverted: 0, all: category::PRESENT, any: 0, report: 0 };

/// Where one may change its mind about the way of asking: 64 MiB.
const PIECE_PAGES: u64 = 16384;

/// 20,000 stretches a GiB, above which the page cache is asked.
const PIECE_STRETCHES: u64 = 1250;
