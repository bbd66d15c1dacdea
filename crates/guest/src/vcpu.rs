//! One vCPU's workload: it visits its pages again and again, checks each wholly against its table of generations, and
//! writes every other one. Knows nothing of threads, and nothing of who moves the guest.

use crate::memory::{Memory, WORDS};
use crate::stamp::{self, mixed};
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering::Relaxed;

/// A vCPU and the pages that are its own: first its table of generations, a word a page, then what it works on.
#[derive(Debug)]
pub(crate) struct Vcpu {
    table: u64,
    first: u64,
    pages: u64,
    /// What moves as its device state.
    pub tally: Tally,
}

/// How far a vCPU has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Tally {
    /// Pages visited.
    pub visits: u64,
    /// Pages written.
    pub writes: u64,
    /// Pages that did not hold what was written to them.
    pub lost: u64,
    /// Times that every page was visited.
    pub laps: u64,
    /// Pages visited in this lap.
    position: u64,
    /// Sum over the table of generations, that of a table of zeros taken off.
    table_sum: u64,
}

impl Vcpu {
    /// A vCPU on `pages` pages from `start`, at least 2.
    pub fn new(start: u64, pages: u64) -> Self {
        let table_pages = pages.div_ceil(WORDS as u64 + 1);
        let (first, pages) = (start + table_pages, pages - table_pages);
        Self { table: start, first, pages, tally: Tally::default() }
    }

    /// Writes a first generation of every page: zeros in a quarter of them.
    pub fn boot(&mut self, memory: &Memory) {
        (0..self.pages).for_each(|page| self.write(memory, page, mixed(page) % 4));
    }

    /// Checks one page, and writes its next generation at every other visit.
    pub fn visit(&mut self, memory: &Memory) {
        let page = self.tally.position.wrapping_mul(STRIDE) % self.pages;
        let generation = self.generation(memory, page);
        let lost = !stamp::holds(memory.words(self.first + page), page, generation);
        self.tally.lost += u64::from(lost);
        // A lost page is written anew, so it counts once.
        if lost || (self.tally.position + self.tally.laps).is_multiple_of(2) {
            self.write(memory, page, generation + 1);
        }
        self.tally.visits += 1;
        self.tally.position += 1;
        if self.tally.position >= self.pages {
            self.tally.laps += 1;
            self.tally.position = 0;
        }
    }

    /// Whether the table of generations in memory is the one that `tally` was saved with.
    pub fn has_its_table(&self, memory: &Memory) -> bool {
        let add = |sum: u64, page| {
            sum.wrapping_add(entry(page, self.generation(memory, page))).wrapping_sub(entry(page, 0))
        };
        (0..self.pages).fold(0, add) == self.tally.table_sum
    }

    fn generation(&self, memory: &Memory, page: u64) -> u64 {
        memory.words(self.table + page / WORDS as u64)[page as usize % WORDS].load(Relaxed)
    }

    fn write(&mut self, memory: &Memory, page: u64, generation: u64) {
        let sum = &mut self.tally.table_sum;
        let table_page = self.table + page / WORDS as u64;
        let before = memory.words(table_page)[page as usize % WORDS].swap(generation, Relaxed);
        *sum = sum.wrapping_sub(entry(page, before)).wrapping_add(entry(page, generation));
        memory.note_written(table_page);
        stamp::write(memory.words(self.first + page), page, generation);
        memory.note_written(self.first + page);
        self.tally.writes += 1;
    }
}

/// What a page adds to the sum over the table.
fn entry(page: u64, generation: u64) -> u64 {
    mixed(page << 32 ^ generation)
}

/// A prime above any number of pages here, so that steps of it come to every page before they come to one again.
const STRIDE: u64 = 2_654_435_761;

#[cfg(test)]
mod tests {
    use super::*;

    fn booted() -> (Memory, Vcpu) {
        let (memory, mut vcpu) = (Memory::new(64 << 12).unwrap(), Vcpu::new(8, 50));
        vcpu.boot(&memory);
        (memory, vcpu)
    }

    fn run_lap(vcpu: &mut Vcpu, memory: &Memory) {
        let laps = vcpu.tally.laps;
        while vcpu.tally.laps == laps {
            vcpu.visit(memory);
        }
    }

    #[test]
    fn an_undisturbed_guest_loses_nothing() {
        let (memory, mut vcpu) = booted();
        (0..10).for_each(|_| run_lap(&mut vcpu, &memory));
        assert_eq!(vcpu.tally.lost, 0);
        assert_eq!(vcpu.tally.visits, 10 * vcpu.pages);
        assert!(vcpu.has_its_table(&memory));
    }

    #[test]
    fn every_page_that_goes_back_in_time_is_counted_once() {
        let (memory, mut vcpu) = booted();
        let read = |page: u64| memory.words(page).each_ref().map(|word| word.load(Relaxed));
        let old: Vec<_> = (0..vcpu.pages).map(|page| read(vcpu.first + page)).collect();
        (0..2).for_each(|_| run_lap(&mut vcpu, &memory));
        for (page, old) in old.iter().enumerate() {
            let words = memory.words(vcpu.first + page as u64);
            words.iter().zip(old).for_each(|(word, old)| word.store(*old, Relaxed));
        }
        (0..2).for_each(|_| run_lap(&mut vcpu, &memory));
        assert_eq!(vcpu.tally.lost, vcpu.pages);
    }

    #[test]
    fn a_table_that_goes_back_in_time_is_told() {
        let (memory, mut vcpu) = booted();
        let word = &memory.words(vcpu.table)[7];
        let old = word.load(Relaxed);
        (0..2).for_each(|_| run_lap(&mut vcpu, &memory));
        word.store(old, Relaxed);
        assert!(!vcpu.has_its_table(&memory));
    }
}
