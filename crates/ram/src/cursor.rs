//! Cuts page sets into batches: what one packet carries. Holds its place in the sets, not the sets.

use crate::{BlockId, PageSets};

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
            while batch.pages.len() < pages_max
                && let Some(first) = set.next_in(self.page)
            {
                let room = (pages_max - batch.pages.len()) as u64;
                let end = set.next_out(first).min(first + room);
                batch.pages.extend(first..end);
                self.page = end;
            }
            if !batch.pages.is_empty() {
                return true;
            }
            *self = Self { block: self.block + 1, page: 0 };
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Block, Layout, Run};
    use proptest::prelude::*;

    fn layout() -> Layout {
        let block =
            |name: &str, pages: u64| Block { name: name.into(), used_bytes: pages * 4096, page_bytes: 4096 };
        Layout::new(vec![block("a", 200), block("b", 1), block("c", 70)]).unwrap()
    }

    proptest! {
        #[test]
        fn batches_hold_every_page_once_and_never_two_blocks(
            pages in prop::collection::vec((0u16..3, 0u64..200), 0..300),
            pages_max in 1usize..130,
        ) {
            let layout = layout();
            let mut sets = PageSets::new(&layout);
            for (block, page) in pages {
                let first = page % layout.block(BlockId(block)).pages();
                sets[BlockId(block)].insert(Run { first, count: 1 });
            }
            let (mut cursor, mut batch, mut seen) = (Cursor::default(), Batch::with_room(pages_max), PageSets::new(&layout));
            while cursor.fill(&sets, &mut batch, pages_max) {
                prop_assert!(!batch.pages.is_empty() && batch.pages.len() <= pages_max);
                for &first in &batch.pages {
                    prop_assert!(!seen[batch.block].contains(first));
                    seen[batch.block].insert(Run { first, count: 1 });
                }
            }
            prop_assert_eq!(seen, sets);
        }
    }
}
