//! The RAM of a VM that runs in another process. Knows how each region is reached: mapped by us as well, or copied
//! through the kernel. Does not know which pages are wanted.

#![expect(unsafe_code, reason = "promises that located pages can be read and rooms written")]

use crate::foreign::{self, Stopped, Way};
use crate::mapping::Mapping;
use crate::pagemap::{self, Pagemap, Query, Stretch, category};
use crate::uffd::Uffd;
use crate::{Backing, Batch, BlockId, CopyBuf, File, Land, Layout, PAGE, PageSets};
use crate::{RamError, Reach, Region, Run, Store};
use std::fs;
use std::io;
use std::ptr::NonNull;

/// The RAM of a VM in another process.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    layout: Layout,
    /// For each block its places, ascending by page.
    places: Vec<Vec<Place>>,
    pagemap: Pagemap,
    /// Watches our own mappings at the source; see [`Process::dropped`].
    watch: Option<Uffd>,
}

/// A region and the way to it.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) region: Region,
    /// Shared memory, mapped by us too.
    pub(crate) mapping: Option<Mapping>,
    /// The file behind a private mapping.
    private_file: Option<fs::File>,
}

impl Place {
    fn new(region: &Region, map: impl Fn(&Region, &File) -> io::Result<Mapping>) -> io::Result<Self> {
        let (mapping, private_file) = match &region.backing {
            Backing::Anonymous => (None, None),
            Backing::PrivateFile(file) => (None, Some(fs::File::open(&file.path)?)),
            Backing::Shared(file) => (Some(map(region, file)?), None),
        };
        Ok(Self { region: region.clone(), mapping, private_file })
    }

    /// The file behind it, and what keeps its pages.
    pub(crate) fn file(&self) -> Option<(&fs::File, Store)> {
        let opened = self.mapping.as_ref().map(Mapping::file).or(self.private_file.as_ref())?;
        Some((opened, self.behind()?.store))
    }

    /// Offset of the region in its file.
    pub(crate) fn offset(&self) -> u64 {
        self.behind().map_or(0, |file| file.offset)
    }

    fn behind(&self) -> Option<&File> {
        match &self.region.backing {
            Backing::Anonymous => None,
            Backing::PrivateFile(file) | Backing::Shared(file) => Some(file),
        }
    }

    pub(crate) fn end(&self) -> u64 {
        self.region.first_page + self.region.pages
    }

    /// Address of a page of the block in the VM's process.
    pub(crate) fn host(&self, page: u64) -> u64 {
        self.region.host + (page - self.region.first_page) * PAGE as u64
    }
}

impl Process {
    /// Reaches the RAM of a running VM, to read it. Shared memory is mapped, which takes CAP_CHECKPOINT_RESTORE
    /// (or CAP_SYS_ADMIN); private memory is copied, which takes the right to trace the process.
    pub fn source(pid: i32, layout: &Layout, regions: &[Region]) -> Result<Self, RamError> {
        let mut process = Self::new(pid, layout, regions, Mapping::source)?;
        let mapped = process.places.iter().flatten().any(|place| place.mapping.is_some());
        if mapped {
            process.watch = Some(Uffd::own().map_err(|source| RamError::Watch { source })?);
        }
        Ok(process)
    }

    /// Reaches the RAM of a VM that does not run yet, to write it.
    pub fn target(pid: i32, layout: &Layout, regions: &[Region]) -> Result<Self, RamError> {
        Self::new(pid, layout, regions, Mapping::target)
    }

    fn new(
        pid: i32,
        layout: &Layout,
        regions: &[Region],
        map: impl Fn(&Region, &File) -> io::Result<Mapping>,
    ) -> Result<Self, RamError> {
        check_page_size()?;
        let pagemap = Pagemap::open(pid).map_err(|source| unopened(pid, source))?;
        let mut places: Vec<Vec<Place>> = layout.iter().map(|_| Vec::new()).collect();
        for region in regions {
            let place = Place::new(region, &map).map_err(|source| unmapped(layout, region, source))?;
            places[region.block.index()].push(place);
        }
        places.iter_mut().for_each(|places| places.sort_by_key(|place| place.region.first_page));
        let process = Self { pid, layout: layout.clone(), places, pagemap, watch: None };
        process.check_cover()?;
        Ok(process)
    }

    /// The VM's process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Its RAM blocks.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Its regions, block by block, ascending.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        self.places.iter().flatten().map(|place| &place.region)
    }

    /// Whether all of a block is mapped by us, so that a device can read it. Otherwise it is copied.
    pub fn is_mapped(&self, block: BlockId) -> bool {
        self.places[block.index()].iter().all(|place| place.mapping.is_some())
    }

    /// Our descriptor of the file behind a region, and what keeps its pages.
    pub fn file(&self, region: &Region) -> Option<(&fs::File, Store)> {
        self.place(region.block, region.first_page).file()
    }

    /// Calls `each` with the pages of `run` that hold data in the file behind them. Where there is a file, what is
    /// left out is a hole of it.
    pub fn stored(&self, block: BlockId, run: Run, mut each: impl FnMut(Run)) -> Result<(), RamError> {
        let mut room = [Stretch::default(); 256];
        self.cut(block, run).try_for_each(|(place, run)| {
            place
                .stored(&self.pagemap, run, &mut room, &mut each)
                .map_err(|source| self.unpopulated(block, source))
        })
    }

    /// Calls `each` with the pages of `run` that we don't have mapped, though the block is. One that was located
    /// before was taken out of its file since: discarded, even if the guest touched it again, or just reclaimed.
    pub fn dropped(&self, block: BlockId, run: Run, mut each: impl FnMut(Run)) -> Result<(), RamError> {
        let own = Pagemap::own().map_err(|source| RamError::Watch { source })?;
        let mut room = pagemap::room();
        for (place, run) in self.cut(block, run) {
            let Some(mapping) = &place.mapping else { continue };
            let first_page = place.region.first_page;
            let addresses = mapping.addresses(run.first - first_page..run.end() - first_page);
            let start = addresses.start;
            own.scan(addresses, ABSENT, &mut room, |stretch| {
                let page = |address: u64| run.first + (address - start) / PAGE as u64;
                let first = page(stretch.start);
                each(Run { first, count: page(stretch.end) - first });
            })
            .map_err(|source| RamError::Watch { source })?;
        }
        Ok(())
    }

    fn unpopulated(&self, block: BlockId, source: io::Error) -> RamError {
        if source.raw_os_error() == Some(libc::ESRCH) {
            return RamError::Gone { pid: self.pid };
        }
        RamError::Populated { block: self.layout.block(block).name.clone(), source }
    }

    fn check_cover(&self) -> Result<(), RamError> {
        for (id, block) in self.layout.iter() {
            let mut next = 0;
            for place in &self.places[id.index()] {
                if place.region.first_page != next {
                    break;
                }
                next += place.region.pages;
            }
            if next != block.pages() {
                return Err(RamError::Cover { block: block.name.clone(), page: next, pages: block.pages() });
            }
        }
        Ok(())
    }

    /// The place of a page.
    fn place(&self, block: BlockId, page: u64) -> &Place {
        let places = &self.places[block.index()];
        let at = places.partition_point(|place| place.end() <= page);
        places.get(at).unwrap_or_else(|| {
            panic!("page {page} is outside of RAM block {}", self.layout.block(block).name)
        })
    }

    /// Cuts a run where it goes from one place to the next.
    fn cut(&self, block: BlockId, run: Run) -> impl Iterator<Item = (&Place, Run)> {
        let mut first = run.first;
        std::iter::from_fn(move || {
            if first == run.end() {
                return None;
            }
            let place = self.place(block, first);
            let here = Run { first, count: place.end().min(run.end()) - first };
            first = here.end();
            Some((place, here))
        })
    }

    /// Cuts a batch where it goes from one place to the next.
    fn stretches<'a>(&'a self, batch: &'a Batch) -> impl Iterator<Item = (&'a Place, &'a [u64])> {
        let mut rest = batch.pages.as_slice();
        std::iter::from_fn(move || {
            let place = self.place(batch.block, *rest.first()?);
            let (here, after) = rest.split_at(rest.partition_point(|&page| page < place.end()));
            rest = after;
            Some((place, here))
        })
    }

    /// Copies pages of a private place from or to the slots of a copy buffer that start at `local`.
    fn copy(&self, way: Way, place: &Place, pages: &[u64], local: NonNull<u8>) -> Result<(), RamError> {
        let remote = pages.iter().map(|&page| place.host(page));
        // SAFETY: the callers give the first of as many slots as there are pages.
        unsafe { foreign::copy(self.pid, way, remote, local.as_ptr()) }
            .map_err(|stopped| self.stopped(way, place, pages.len() as u64, stopped))
    }

    /// Appends where we have pages of a shared place mapped.
    fn point_at(
        &self,
        place: &Place,
        mapping: &Mapping,
        pages: &[u64],
        at: &mut Vec<NonNull<u8>>,
    ) -> Result<(), RamError> {
        for &page in pages {
            let page = page - place.region.first_page;
            mapping.ready(page, self.watch.as_ref()).map_err(|source| self.unready(place, source))?;
            at.push(mapping.page(page));
        }
        Ok(())
    }

    /// Writes zeros over the pages of a private place that may hold something else.
    fn blank(&self, place: &Place, run: Run) -> Result<(), RamError> {
        let mut holding = Vec::new();
        let mut room = [Stretch::default(); 64];
        place
            .resident(&self.pagemap, run, &mut room, |run| holding.push(run))
            .and_then(|()| place.stored(&self.pagemap, run, &mut room, |run| holding.push(run)))
            .map_err(|source| self.unpopulated(place.region.block, source))?;
        holding.into_iter().try_for_each(|run| {
            foreign::blank(self.pid, place.host(run.first), run.count)
                .map_err(|stopped| self.stopped(Way::Write, place, run.count, stopped))
        })
    }

    fn stopped(&self, way: Way, place: &Place, pages: u64, stopped: Stopped) -> RamError {
        if stopped.source.raw_os_error() == Some(libc::ESRCH) {
            return RamError::Gone { pid: self.pid };
        }
        let first = place.region.first_page * PAGE as u64;
        RamError::Access {
            what: if way == Way::Read { "read" } else { "write" },
            block: self.layout.block(place.region.block).name.clone(),
            offset: first + stopped.at.wrapping_sub(place.region.host),
            bytes: pages as usize * PAGE,
            source: stopped.source,
        }
    }

    fn unready(&self, place: &Place, source: io::Error) -> RamError {
        unmapped(&self.layout, &place.region, source)
    }
}

// SAFETY: a mapped page stays mapped as long as `self`; a copied page is in `copy`.
unsafe impl Reach for Process {
    fn locate(&self, batch: &Batch, copy: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError> {
        let mut slots = 0;
        for (place, pages) in self.stretches(batch) {
            match &place.mapping {
                Some(mapping) => self.point_at(place, mapping, pages, at)?,
                None => {
                    let first = slots;
                    slots += pages.len();
                    at.extend((first..slots).map(|slot| copy.slot(slot)));
                    self.copy(Way::Read, place, pages, copy.slot(first))?;
                }
            }
        }
        Ok(())
    }

    fn populated(&self, into: &mut PageSets) -> Result<(), RamError> {
        let mut room = pagemap::room();
        for place in self.places.iter().flatten() {
            let block = place.region.block;
            let all = Run { first: place.region.first_page, count: place.region.pages };
            place
                .resident(&self.pagemap, all, &mut room, |run| into[block].insert(run))
                .and_then(|()| place.stored(&self.pagemap, all, &mut room, |run| into[block].insert(run)))
                .map_err(|source| self.unpopulated(block, source))?;
        }
        Ok(())
    }
}

// SAFETY: as for `Reach`; at the target the mappings are writable.
unsafe impl Land for Process {
    fn room(&self, batch: &Batch, copy: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError> {
        let mut slots = 0;
        for (place, pages) in self.stretches(batch) {
            match &place.mapping {
                Some(mapping) => self.point_at(place, mapping, pages, at)?,
                None => {
                    at.extend((slots..slots + pages.len()).map(|slot| copy.slot(slot)));
                    slots += pages.len();
                }
            }
        }
        Ok(())
    }

    fn settle(&self, batch: &Batch, copy: &CopyBuf) -> Result<(), RamError> {
        let mut slots = 0;
        for (place, pages) in self.stretches(batch).filter(|(place, _)| place.mapping.is_none()) {
            self.copy(Way::Write, place, pages, copy.slot(slots))?;
            slots += pages.len();
        }
        Ok(())
    }

    fn zero(&self, block: BlockId, run: Run) -> Result<(), RamError> {
        self.cut(block, run).try_for_each(|(place, run)| match &place.mapping {
            Some(mapping) => {
                let first = run.first - place.region.first_page;
                mapping.zero(first..first + run.count).map_err(|source| self.unready(place, source))
            }
            None => self.blank(place, run),
        })
    }
}

fn check_page_size() -> Result<(), RamError> {
    // SAFETY: a call without pointers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    if bytes == PAGE as i64 { Ok(()) } else { Err(RamError::PageSize { bytes }) }
}

fn unopened(pid: i32, source: io::Error) -> RamError {
    match source.kind() {
        io::ErrorKind::NotFound => RamError::Gone { pid },
        _ => RamError::Pagemap { pid, source },
    }
}

fn unmapped(layout: &Layout, region: &Region, source: io::Error) -> RamError {
    let block = layout.block(region.block).name.clone();
    let path = match &region.backing {
        Backing::Anonymous => String::new(),
        Backing::PrivateFile(file) | Backing::Shared(file) => file.path.display().to_string(),
    };
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => RamError::Forbidden { block, path, source },
        _ => RamError::Map { block, path, source },
    }
}

/// Not mapped, whatever else.
const ABSENT: Query = Query {
    protect: false,
    registered: false,
    inverted: category::PRESENT,
    all: category::PRESENT,
    any: 0,
    report: 0,
};
