//! Cuts page sets into batches: what one packet carries. Holds its place in the sets, not the sets.

use crate::{BlockId, PageSet, PageSets};
use std::ops::Range;

/// Pages of one RAM block that travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The block all pages are of.
    pub block: BlockId,
    /// Page indices, ascending, each once. Its capacity is kept when the batch is filled again.
    pub pages: Vec<u64>,
}

impl Batch {
    /// An empty batch with room for `pages_max` pages.
    pub fn with_room(pages_max: usize) -> Self {
        Self { block: BlockId(0), pages: Vec::with_capacity(pages_max) }
    }
}

/// A place in page sets that only moves forward.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    block: u16,
    page: u64,
}

impl Cursor {
    /// Fills `batch` with the next pages, at most `pages_max` and all of one block. False when none are left,
    /// with the batch empty.
    pub fn fill(&mut self, sets: &PageSets, batch: &mut Batch, pages_max: usize) -> bool {
        batch.pages.clear();
        while let Some(set) = sets.get(BlockId(self.block)) {
            batch.block = BlockId(self.block);
            self.page = append(batch, pages_max, set, self.page..set.pages());
            if !batch.pages.is_empty() {
                return true;
            }
            *self = Self { block: self.block + 1, page: 0 };
        }
        false
    }

    /// As [`Cursor::fill`], but takes pages from `area`, which is of its caller alone, and takes a new area where
    /// that has no more. So callers stay out of each other's neighbourhood.
    pub fn fill_from(
        &mut self,
        area: &mut Area,
        sets: &PageSets,
        batch: &mut Batch,
        pages_max: usize,
    ) -> bool {
        batch.pages.clear();
        loop {
            let block = BlockId(area.block);
            if !batch.pages.is_empty() && (batch.pages.len() == pages_max || batch.block != block) {
                return true;
            }
            if let Some(set) = sets.get(block) {
                batch.block = block;
                area.page = append(batch, pages_max, set, area.page..area.end);
            }
            if batch.pages.len() < pages_max && !self.next_area(sets, area) {
                return !batch.pages.is_empty();
            }
        }
    }

    /// The next area that has a page in it. False if there is none; then `area` is empty.
    fn next_area(&mut self, sets: &PageSets, area: &mut Area) -> bool {
        while let Some(set) = sets.get(BlockId(self.block)) {
            if let Some(page) = set.next_in(self.page) {
                let end = (page + 1).next_multiple_of(AREA_PAGES).min(set.pages());
                *area = Area { block: self.block, page, end };
                self.page = end;
                return true;
            }
            *self = Self { block: self.block + 1, page: 0 };
        }
        *area = Area::default();
        false
    }
}

/// A stretch of a block that one channel works through.
#[derive(Clone, Copy, Debug, Default)]
pub struct Area {
    block: u16,
    page: u64,
    end: u64,
}

/// Appends pages of the range until the batch has `pages_max`; gives the page where it stopped.
fn append(batch: &mut Batch, pages_max: usize, set: &PageSet, range: Range<u64>) -> u64 {
    let mut page = range.start;
    while batch.pages.len() < pages_max
        && let Some(first) = set.next_in(page).filter(|&first| first < range.end)
    {
        let room = (pages_max - batch.pages.len()) as u64;
        page = set.next_out_by(first, (first + room).min(range.end));
        batch.pages.extend(first..page);
    }
    page
}

/// 2 MiB: a huge page, and what is mapped in one go.
const AREA_PAGES: u64 = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Block, Layout, Run};
    use proptest::prelude::*;

    fn layout() -> Layout {
        let block =
            |name: &str, pages: u64| Block { name: name.into(), used_bytes: pages * 4096, page_bytes: 4096 };
        Layout::new(vec![block("a", 2000), block("b", 1), block("c", 700)]).unwrap()
    }

    fn sets(layout: &Layout, pages: Vec<(u16, u64)>) -> PageSets {
        let mut sets = PageSets::new(layout);
        for (block, page) in pages {
            let first = page % layout.block(BlockId(block)).pages();
            sets[BlockId(block)].insert(Run { first, count: 1 });
        }
        sets
    }

    /// Takes batches until there are none left; gives all their pages.
    fn drain(layout: &Layout, pages_max: usize, mut fill: impl FnMut(&mut Batch) -> bool) -> PageSets {
        let (mut batch, mut seen) = (Batch::with_room(pages_max), PageSets::new(layout));
        while fill(&mut batch) {
            assert!(!batch.pages.is_empty() && batch.pages.len() <= pages_max);
            for &first in &batch.pages {
                assert!(!seen[batch.block].contains(first));
                seen[batch.block].insert(Run { first, count: 1 });
            }
        }
        seen
    }

    proptest! {
        #[test]
        fn batches_hold_every_page_once_and_never_two_blocks(
            pages in prop::collection::vec((0u16..3, 0u64..3000), 0..300),
            pages_max in 1usize..130,
        ) {
            let (layout, mut cursor) = (layout(), Cursor::default());
            let sets = sets(&layout, pages);
            let seen = drain(&layout, pages_max, |batch| cursor.fill(&sets, batch, pages_max));
            prop_assert_eq!(seen, sets);
        }

        #[test]
        fn callers_with_areas_of_their_own_get_every_page_once_between_them(
            pages in prop::collection::vec((0u16..3, 0u64..3000), 0..300),
            pages_max in 1usize..130,
            turns in prop::collection::vec(0usize..3, 1..50),
        ) {
            let (layout, mut cursor, mut areas) = (layout(), Cursor::default(), [Area::default(); 3]);
            let sets = sets(&layout, pages);
            let mut turns = turns.iter().copied().cycle();
            let seen = drain(&layout, pages_max, |batch| {
                // One who gets nothing is done; then it is for the others to go on.
                let caller = turns.next().unwrap();
                (0..3).any(|step| cursor.fill_from(&mut areas[(caller + step) % 3], &sets, batch, pages_max))
            });
            prop_assert_eq!(seen, sets);
        }
    }

    #[test]
    fn callers_stay_out_of_each_others_neighbourhood() {
        let layout = layout();
        let sets = sets(&layout, (0..2 * AREA_PAGES).map(|page| (0, page)).collect());
        let (mut cursor, mut areas, mut batch) =
            (Cursor::default(), [Area::default(); 2], Batch::with_room(64));
        for first in [0, 64, 128] {
            for (caller, area) in areas.iter_mut().enumerate() {
                assert!(cursor.fill_from(area, &sets, &mut batch, 64));
                assert_eq!(batch.pages[0], caller as u64 * AREA_PAGES + first);
            }
        }
    }
}
