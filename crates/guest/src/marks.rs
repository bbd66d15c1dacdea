//! One bit a page that many threads may set and one takes away. Knows nothing of what a mark means.

use ram::{PageSet, Run};
use std::sync::atomic::{AtomicU64, Ordering};

/// Marked pages. Who sees a mark sees what was done before it was set.
#[derive(Debug)]
pub(crate) struct Marks(Vec<AtomicU64>);

impl Marks {
    /// No page of `pages` is marked.
    pub fn new(pages: u64) -> Self {
        Self((0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Marks a page.
    pub fn set(&self, page: u64) {
        self.0[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::AcqRel);
    }

    /// Takes a mark away.
    pub fn unset(&self, page: u64) {
        self.0[(page / 64) as usize].fetch_and(!(1 << (page % 64)), Ordering::AcqRel);
    }

    /// Takes all marks away.
    pub fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Release));
    }

    /// Adds the marked pages.
    pub fn read(&self, into: &mut PageSet) {
        each(&self.0, |word| word.load(Ordering::Acquire), |page| into.insert(Run { first: page, count: 1 }));
    }

    /// Calls `found` with each marked page, which is unmarked before.
    pub fn take(&self, found: impl FnMut(u64)) {
        each(&self.0, |word| word.swap(0, Ordering::AcqRel), found);
    }
}

fn each(words: &[AtomicU64], read: impl Fn(&AtomicU64) -> u64, mut found: impl FnMut(u64)) {
    for (at, word) in words.iter().enumerate() {
        let mut bits = read(word);
        while bits != 0 {
            found(at as u64 * 64 + u64::from(bits.trailing_zeros()));
            bits &= bits - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_taken_once() {
        let marks = Marks::new(130);
        [0, 63, 64, 129].into_iter().for_each(|page| marks.set(page));
        marks.unset(63);
        let mut taken = Vec::new();
        marks.take(|page| taken.push(page));
        assert_eq!(taken, [0, 64, 129]);
        marks.take(|page| panic!("page {page} again"));
    }
}
