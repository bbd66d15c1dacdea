//! Sets of pages: one bit a page, one bitmap a RAM block. The only thing here that grows with the VM.

use crate::{BlockId, Layout};
use std::ops::{Index, IndexMut};

/// A run of neighbouring pages: `first` and the `count` pages from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the first page in its block.
    pub first: u64,
    /// Number of pages.
    pub count: u64,
}

impl Run {
    /// The page after the last.
    pub fn end(self) -> u64 {
        self.first + self.count
    }
}

/// The pages of one RAM block that are in the set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    words: Vec<u64>,
    pages: u64,
    len: u64,
}

impl PageSet {
    /// An empty set for a block of `pages` pages.
    pub fn new(pages: u64) -> Self {
        Self { words: vec![0; pages.div_ceil(64) as usize], pages, len: 0 }
    }

    /// Pages in the block.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages in the set.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the page is in the set.
    pub fn contains(&self, page: u64) -> bool {
        assert!(page < self.pages, "page {page} of a block of {}", self.pages);
        self.words[(page / 64) as usize] >> (page % 64) & 1 == 1
    }

    /// Puts every page of the run into the set. Panics if the run leaves the block.
    pub fn insert(&mut self, run: Run) {
        self.each_word(run, |word, mask| *word |= mask);
    }

    /// Takes every page of the run out of the set. Panics if the run leaves the block.
    pub fn remove(&mut self, run: Run) {
        self.each_word(run, |word, mask| *word &= !mask);
    }

    /// Puts every page of `other` into this set.
    pub fn union(&mut self, other: &PageSet) {
        self.combine(other, |mine, theirs| mine | theirs);
    }

    /// Takes every page of `other` out of this set.
    pub fn subtract(&mut self, other: &PageSet) {
        self.combine(other, |mine, theirs| mine & !theirs);
    }

    /// Keeps the pages that are also in `other`.
    pub fn intersect(&mut self, other: &PageSet) {
        self.combine(other, |mine, theirs| mine & theirs);
    }

    /// Takes all pages out.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.len = 0;
    }

    /// The set as runs, ascending, as long as they can be.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let first = self.next_in(from)?;
            let end = self.next_out(first);
            from = end;
            Some(Run { first, count: end - first })
        })
    }

    /// The first page of the set at or after `from`.
    pub fn next_in(&self, from: u64) -> Option<u64> {
        next(&self.words, from, |word| word).filter(|&page| page < self.pages)
    }

    /// The first page outside the set at or after `from`; the block's end if there is none.
    pub fn next_out(&self, from: u64) -> u64 {
        next(&self.words, from, |word| !word).map_or(self.pages, |page| page.min(self.pages))
    }

    /// As [`PageSet::next_out`], but looks no further than `end`.
    pub fn next_out_by(&self, from: u64, end: u64) -> u64 {
        let words = &self.words[..(end.min(self.pages).div_ceil(64)) as usize];
        next(words, from, |word| !word).map_or(end, |page| page.min(end)).min(self.pages)
    }

    fn each_word(&mut self, run: Run, change: impl Fn(&mut u64, u64)) {
        let end = run.first.checked_add(run.count).expect("a run ends inside u64");
        assert!(end <= self.pages, "pages {}..{end} of a block of {}", run.first, self.pages);
        let mut page = run.first;
        while page < end {
            let bit = page % 64;
            let count = (64 - bit).min(end - page);
            let mask = (!0u64 >> (64 - count)) << bit;
            let word = &mut self.words[(page / 64) as usize];
            let before = word.count_ones();
            change(word, mask);
            self.len = self.len + u64::from(word.count_ones()) - u64::from(before);
            page += count;
        }
    }

    fn combine(&mut self, other: &PageSet, change: impl Fn(u64, u64) -> u64) {
        assert_eq!(self.pages, other.pages, "sets of blocks of different sizes");
        let mut len = 0;
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            *mine = change(*mine, *theirs);
            len += u64::from(mine.count_ones());
        }
        self.len = len;
    }
}

/// The first bit that `view` shows at or after `from`.
fn next(words: &[u64], from: u64, view: impl Fn(u64) -> u64) -> Option<u64> {
    let mut at = (from / 64) as usize;
    let mut word = view(*words.get(at)?) & (!0 << (from % 64));
    while word == 0 {
        at += 1;
        word = view(*words.get(at)?);
    }
    Some(at as u64 * 64 + u64::from(word.trailing_zeros()))
}

/// One [`PageSet`] for every block of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSets(Vec<PageSet>);

impl PageSets {
    /// Empty sets for every block.
    pub fn new(layout: &Layout) -> Self {
        Self(layout.iter().map(|(_, block)| PageSet::new(block.pages())).collect())
    }

    /// Pages in the sets of all blocks.
    pub fn len(&self) -> u64 {
        self.0.iter().map(PageSet::len).sum()
    }

    /// Whether no page of any block is in.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(PageSet::is_empty)
    }

    /// Takes all pages out.
    pub fn clear(&mut self) {
        self.0.iter_mut().for_each(PageSet::clear);
    }

    /// Puts every page of `other` in.
    pub fn union(&mut self, other: &PageSets) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| mine.union(theirs));
    }

    /// Takes every page of `other` out.
    pub fn subtract(&mut self, other: &PageSets) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| mine.subtract(theirs));
    }

    /// The set of a block, if the layout has it.
    pub fn get(&self, block: BlockId) -> Option<&PageSet> {
        self.0.get(block.index())
    }

    /// The sets with their blocks, in the order of the layout.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (BlockId, &PageSet)> {
        self.0.iter().enumerate().map(|(at, set)| (BlockId(at as u16), set))
    }
}

impl Index<BlockId> for PageSets {
    type Output = PageSet;

    fn index(&self, block: BlockId) -> &PageSet {
        &self.0[block.index()]
    }
}

impl IndexMut<BlockId> for PageSets {
    fn index_mut(&mut self, block: BlockId) -> &mut PageSet {
        &mut self.0[block.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[derive(Clone, Debug)]
    enum Op {
        Insert(Run),
        Remove(Run),
        Union(Vec<u64>),
        Subtract(Vec<u64>),
        Intersect(Vec<u64>),
    }

    const PAGES: u64 = 300;

    fn run() -> impl Strategy<Value = Run> {
        (0..PAGES).prop_flat_map(|first| (0..=PAGES - first).prop_map(move |count| Run { first, count }))
    }

    fn op() -> impl Strategy<Value = Op> {
        let pages = || prop::collection::vec(0..PAGES, 0..64);
        prop_oneof![
            run().prop_map(Op::Insert),
            run().prop_map(Op::Remove),
            pages().prop_map(Op::Union),
            pages().prop_map(Op::Subtract),
            pages().prop_map(Op::Intersect),
        ]
    }

    fn set_of(pages: &[u64]) -> PageSet {
        let mut set = PageSet::new(PAGES);
        pages.iter().for_each(|&first| set.insert(Run { first, count: 1 }));
        set
    }

    fn apply(set: &mut PageSet, oracle: &mut BTreeSet<u64>, op: Op) {
        match op {
            Op::Insert(run) => {
                set.insert(run);
                oracle.extend(run.first..run.end());
            }
            Op::Remove(run) => {
                set.remove(run);
                oracle.retain(|page| !(run.first..run.end()).contains(page));
            }
            Op::Union(pages) => {
                set.union(&set_of(&pages));
                oracle.extend(pages);
            }
            Op::Subtract(pages) => {
                set.subtract(&set_of(&pages));
                oracle.retain(|page| !pages.contains(page));
            }
            Op::Intersect(pages) => {
                set.intersect(&set_of(&pages));
                oracle.retain(|page| pages.contains(page));
            }
        }
    }

    proptest! {
        #[test]
        fn a_page_set_is_a_set_of_pages(ops in prop::collection::vec(op(), 0..24)) {
            let mut set = PageSet::new(PAGES);
            let mut oracle = BTreeSet::new();
            for op in ops {
                apply(&mut set, &mut oracle, op);
                prop_assert_eq!(set.len(), oracle.len() as u64);
            }
            let listed: Vec<u64> = set.runs().flat_map(|run| run.first..run.end()).collect();
            let wanted: Vec<u64> = oracle.iter().copied().collect();
            prop_assert_eq!(listed, wanted);
            let runs: Vec<Run> = set.runs().collect();
            prop_assert!(runs.windows(2).all(|pair| pair[0].end() < pair[1].first));
        }
    }

    #[test]
    #[should_panic(expected = "pages 299..301 of a block of 300")]
    fn a_run_outside_the_block_is_a_broken_promise() {
        PageSet::new(PAGES).insert(Run { first: 299, count: 2 });
    }
}
