//! What has to be sent again, and which of it is not to be read.

use ram::{BlockId, Layout, PageSets, Run};

/// Pages to send again. A page is in at most one of the two sets.
#[derive(Clone, Debug)]
pub struct Changes {
    /// Pages to be read and sent.
    pub data: PageSets,
    /// Pages that are holes now: zero, and not to be read, since that would allocate them.
    pub gone: PageSets,
}

impl Changes {
    /// No pages of these blocks.
    pub fn new(layout: &Layout) -> Self {
        Self { data: PageSets::new(layout), gone: PageSets::new(layout) }
    }

    /// Pages of both sets.
    pub fn len(&self) -> u64 {
        self.data.len() + self.gone.len()
    }

    /// Whether nothing has to be sent.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty() && self.gone.is_empty()
    }

    /// Forgets all pages.
    pub fn clear(&mut self) {
        self.data.clear();
        self.gone.clear();
    }

    /// Adds pages to be read.
    pub fn insert_data(&mut self, block: BlockId, run: Run) {
        self.data[block].insert(run);
        self.gone[block].remove(run);
    }

    /// Adds pages that are holes.
    pub fn insert_gone(&mut self, block: BlockId, run: Run) {
        self.gone[block].insert(run);
        self.data[block].remove(run);
    }

    /// Adds what was found later; where both know a page, the later word counts.
    pub fn merge(&mut self, later: &Changes) {
        self.data.union(&later.data);
        self.gone.subtract(&later.data);
        self.gone.union(&later.gone);
        self.data.subtract(&later.gone);
    }

    /// Adds pages to be read, but for those that are known to be holes.
    pub fn add_data(&mut self, pages: &PageSets) {
        self.data.union(pages);
        self.data.subtract(&self.gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ram::Block;

    const BLOCK: BlockId = BlockId(0);

    fn changes(data: &[u64], gone: &[u64]) -> Changes {
        let block = Block { name: "ram".into(), used_bytes: 64 * 4096, page_bytes: 4096 };
        let mut changes = Changes::new(&Layout::new(vec![block]).unwrap());
        data.iter().for_each(|&first| changes.insert_data(BLOCK, Run { first, count: 1 }));
        gone.iter().for_each(|&first| changes.insert_gone(BLOCK, Run { first, count: 1 }));
        changes
    }

    fn pages(set: &PageSets) -> Vec<u64> {
        set[BLOCK].runs().flat_map(|run| run.first..run.end()).collect()
    }

    #[test]
    fn the_later_word_about_a_page_counts() {
        let mut pending = changes(&[1, 2], &[3, 4]);
        pending.merge(&changes(&[3, 5], &[2, 6]));
        assert_eq!(pages(&pending.data), [1, 3, 5]);
        assert_eq!(pages(&pending.gone), [2, 4, 6]);
    }

    #[test]
    fn a_known_hole_is_not_read_again() {
        let mut pending = changes(&[1], &[3]);
        pending.add_data(&changes(&[2, 3], &[]).data);
        assert_eq!((pages(&pending.data), pages(&pending.gone)), (vec![1, 2], vec![3]));
    }
}
