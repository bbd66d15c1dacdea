//! Where shared memory that we have mapped holds data. `SEEK_HOLE` looks for a hole up to the end of the file, which
//! takes 7 ms a GiB however little is asked for; the page cache tells a piece at the price of the piece.

#![expect(unsafe_code, reason = "mincore on our own mapping")]

use crate::PAGE;
use crate::extent::{Extents, next_data};
use crate::mapping::Mapping;
use std::fs;
use std::io;
use std::ops::Range;

/// The stretches of a range of pages that hold data, ascending. Pages are counted from the region's first.
pub(crate) struct Cached<'a> {
    mapping: &'a Mapping,
    /// What is left to be told.
    range: Range<u64>,
    /// Asks the file about every page that is not in the cache: it may be swapped out.
    exact: bool,
    /// A byte a page from `seen_first`, up to `seen_end`; bit 0 is set if the page is cached.
    seen: Box<[u8]>,
    seen_first: u64,
    seen_end: u64,
    /// How many pages to look at next: more where much is cached.
    look: u64,
}

impl<'a> Cached<'a> {
    pub(crate) fn new(mapping: &'a Mapping, range: Range<u64>, exact: bool) -> Self {
        let room = LOOK_PAGES_MAX.min(range.end - range.start) as usize;
        let (first, seen) = (range.start, vec![0; room].into());
        let look = LOOK_PAGES_FIRST.min(room as u64);
        Self { mapping, range, exact, seen, seen_first: first, seen_end: first, look }
    }

    fn after(&mut self) -> io::Result<Option<Range<u64>>> {
        while self.range.start < self.range.end {
            let from = self.range.start;
            let first = if from < self.seen_end { self.cached_from(from) } else { self.look_from(from)? };
            let Some(first) = first else { continue };
            let end = (first + 1..self.seen_end).find(|&page| !self.is_cached(page)).unwrap_or(self.seen_end);
            self.range.start = end;
            if self.exact {
                self.seen_end = end;
            }
            return Ok(Some(first..end));
        }
        Ok(None)
    }

    /// The next page that was seen in the cache.
    fn cached_from(&mut self, from: u64) -> Option<u64> {
        let first = (from..self.seen_end).find(|&page| self.is_cached(page));
        if first.is_none() {
            self.range.start = self.seen_end;
        }
        first
    }

    /// Skips to the next data that the file has, and looks at the cache from there.
    fn look_from(&mut self, from: u64) -> io::Result<Option<u64>> {
        let offsets = self.mapping.offsets(from..self.range.end);
        let Some(data) = next_data(self.mapping.file(), offsets.clone())? else {
            self.range.start = self.range.end;
            return Ok(None);
        };
        let first = from + (data - offsets.start) / PAGE as u64;
        let count = self.look.min(self.range.end - first);
        let seen = &mut self.seen[..count as usize];
        let at = self.mapping.page(first).as_ptr();
        // SAFETY: `count` pages from `first` lie inside the mapping, and there is a byte for each.
        let rc = unsafe { libc::mincore(at.cast(), count as usize * PAGE, seen.as_mut_ptr()) };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        let cached = seen.iter().filter(|byte| **byte & 1 == 1).count() as u64;
        // The file says so, though it may be swapped out.
        seen[0] = 1;
        (self.seen_first, self.seen_end) = (first, first + count);
        self.look = if cached * 4 >= count { self.look * 2 } else { self.look / 2 };
        self.look = self.look.clamp(LOOK_PAGES_MIN, LOOK_PAGES_MAX).min(self.seen.len() as u64);
        Ok(Some(first))
    }

    fn is_cached(&self, page: u64) -> bool {
        self.seen[(page - self.seen_first) as usize] & 1 == 1
    }
}

impl Iterator for Cached<'_> {
    type Item = io::Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.after().transpose()
    }
}

/// Calls `each` with the pages of the range that hold data; with some twice if swap is switched on meanwhile.
pub(crate) fn each_data(
    mapping: &Mapping,
    range: Range<u64>,
    mut each: impl FnMut(Range<u64>),
) -> io::Result<()> {
    let pages = range.end - range.start;
    let exact = pages <= LOOK_PAGES_MIN || swap_is_on()?;
    if pages < LOOK_PAGES_MAX {
        Cached::new(mapping, range.clone(), exact).try_for_each(|pages| pages.map(&mut each))?;
    } else {
        each_extent(mapping, range.clone(), exact, &mut each)?;
    }
    if !exact && swap_is_on()? {
        Cached::new(mapping, range, true).try_for_each(|pages| pages.map(&mut each))?;
    }
    Ok(())
}

/// Asks the file for its holes as long as they are few, and the cache where they are many: data in long stretches
/// is told three times faster by the file, every second page eight times faster by the cache.
fn each_extent(
    mapping: &Mapping,
    range: Range<u64>,
    exact: bool,
    each: &mut impl FnMut(Range<u64>),
) -> io::Result<()> {
    let (mut from, mut credit) = (range.start, CREDIT_MAX);
    while from < range.end {
        let offsets = mapping.offsets(from..range.end);
        for data in Extents::new(mapping.file(), offsets.clone()) {
            let data = data?;
            let page = |offset: u64| range.end - (offsets.end - offset) / PAGE as u64;
            let end = page(data.end);
            each(page(data.start)..end);
            credit = (credit + (end - from)).saturating_sub(STRETCH_PAGES).min(CREDIT_MAX);
            from = end;
            if credit == 0 {
                break;
            }
        }
        if credit > 0 {
            return Ok(());
        }
        let piece = from..(from + LOOK_PAGES_MAX).min(range.end);
        Cached::new(mapping, piece.clone(), exact).try_for_each(|pages| pages.map(&mut *each))?;
        (from, credit) = (piece.end, CREDIT_MAX / 8);
    }
    Ok(())
}

fn swap_is_on() -> io::Result<bool> {
    Ok(fs::read_to_string("/proc/swaps")?.lines().count() > 1)
}

/// Pages from one stretch of data to the next that are as cheap one way as the other: 20,000 stretches a GiB.
const STRETCH_PAGES: u64 = 13;

/// How many short stretches are borne before the way is changed.
const CREDIT_MAX: u64 = 512 * STRETCH_PAGES;

/// A system call costs what looking at 30 pages does.
const LOOK_PAGES_MIN: u64 = 32;

/// One chunk.
const LOOK_PAGES_FIRST: u64 = 512;

/// 32 MiB, told in 0.2 ms.
const LOOK_PAGES_MAX: u64 = 8192;
