//! What a page of the guest's workload holds: words that follow from the page and its generation, so that a page of
//! another place or time, or of two times at once, is told at a glance. Every fourth generation is a zero page.

use crate::memory::WORDS;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Writes a generation of a page.
pub(crate) fn write(words: &[AtomicU64; WORDS], page: u64, generation: u64) {
    let stamp = Stamp::new(page, generation);
    words.iter().enumerate().for_each(|(at, word)| word.store(stamp.word(at), Relaxed));
}

/// Whether a page is wholly of this generation.
pub(crate) fn holds(words: &[AtomicU64; WORDS], page: u64, generation: u64) -> bool {
    let stamp = Stamp::new(page, generation);
    words.iter().enumerate().all(|(at, word)| word.load(Relaxed) == stamp.word(at))
}

/// Scatters bits; no two values have the same result (the finaliser of SplitMix64).
pub(crate) fn mixed(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

struct Stamp {
    generation: u64,
    hash: u64,
}

impl Stamp {
    fn new(page: u64, generation: u64) -> Self {
        Self { generation, hash: mixed(page << 32 ^ generation) }
    }

    /// The generation, the hash, and a body that follows from it.
    fn word(&self, at: usize) -> u64 {
        match at {
            _ if self.generation.is_multiple_of(4) => 0,
            0 => self.generation,
            1 => self.hash,
            _ => mixed(self.hash.wrapping_add(at as u64)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u64, generation: u64) -> [AtomicU64; WORDS] {
        let words = std::array::from_fn(|_| AtomicU64::new(7));
        write(&words, number, generation);
        words
    }

    #[test]
    fn a_page_holds_its_own_generation_and_no_other() {
        assert!(holds(&page(5, 3), 5, 3));
        assert!(!holds(&page(5, 3), 5, 2) && !holds(&page(5, 3), 6, 3));
        assert!(holds(&page(5, 4), 5, 4) && !holds(&page(5, 4), 5, 5));
    }

    #[test]
    fn a_page_torn_anywhere_is_told() {
        let (old, new) = (page(5, 2), page(5, 3));
        for cut in 1..WORDS {
            let torn = std::array::from_fn(|at| {
                let side = if at < cut { &new } else { &old };
                AtomicU64::new(side[at].load(Relaxed))
            });
            assert!(!holds(&torn, 5, 3), "cut at {cut}");
        }
    }
}
