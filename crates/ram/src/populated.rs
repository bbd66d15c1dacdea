//! Which pages of a place hold data, told by the page table of the VM's process and by the file behind it. Reads
//! no page that isn't there, so none is allocated by asking.

use crate::cached;
use crate::extent::Extents;
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
            (Store::Shmem, Some(mapping)) => {
                let first = self.region.first_page;
                cached::each_data(mapping, run.first - first..run.end() - first, |pages| {
                    each(Run { first: first + pages.start, count: pages.end - pages.start });
                })
            }
            _ => self.extents(file, run, &mut each),
        }
    }

    /// Data as the file system tells.
    fn extents(&self, file: &fs::File, run: Run, each: &mut impl FnMut(Run)) -> io::Result<()> {
        let offset = |page: u64| self.offset() + (page - self.region.first_page) * PAGE as u64;
        let page = |offset: u64| self.region.first_page + (offset - self.offset()) / PAGE as u64;
        for data in Extents::new(file, offset(run.first)..offset(run.end())) {
            let data = data?;
            each(Run { first: page(data.start), count: (data.end - data.start) / PAGE as u64 });
        }
        Ok(())
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

/// Mapped but not the zero page, or swapped out: with ZERO flipped, one of PRESENT and SWAPPED and no ZERO.
const RESIDENT: Query = Query {
    protect: false,
    registered: false,
    inverted: category::ZERO,
    all: category::ZERO,
    any: category::PRESENT | category::SWAPPED,
    report: 0,
};

const PRESENT: Query =
    Query { protect: false, registered: false, inverted: 0, all: category::PRESENT, any: 0, report: 0 };
