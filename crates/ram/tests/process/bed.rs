//! A child with memory of one kind, and the ways to look at it.

use crate::victim::{Kind, Memory, Victim, privileged};
use ram::{Batch, BlockId, Land, PAGE, PageSet, PageSets, Process, Reach, Run, Window};
use std::os::unix::fs::MetadataExt;

pub const RAM: BlockId = BlockId(0);

pub struct Bed {
    pub memory: Memory,
    pub victim: Victim,
}

impl Bed {
    /// `None` where this machine can't have such memory.
    pub fn new(kind: Kind, bytes: u64) -> Option<Self> {
        if !privileged() {
            return None;
        }
        let victim = Victim::start();
        let memory = victim.map(kind, bytes)?;
        Some(Self { memory, victim })
    }

    pub fn source(&self) -> Process {
        let regions = std::slice::from_ref(&self.memory.region);
        Process::source(self.victim.pid, &self.memory.layout, regions).unwrap()
    }

    pub fn target(&self) -> Process {
        let regions = std::slice::from_ref(&self.memory.region);
        Process::target(self.victim.pid, &self.memory.layout, regions).unwrap()
    }

    pub fn store(&self, page: u64, count: u64, word: u64) {
        self.victim.store(self.memory.page(page), count * PAGE as u64, word);
    }

    /// The first words of pages, as the child sees them. A hole that is looked at is no hole any more.
    pub fn words(&self, pages: impl IntoIterator<Item = u64>) -> Vec<u64> {
        pages.into_iter().map(|page| self.victim.load(self.memory.page(page), 1)).collect()
    }

    /// Bytes that the file behind the memory takes.
    pub fn file_bytes(&self) -> u64 {
        let path = format!("/proc/{}/fd/{}", self.victim.pid, self.memory.fd.unwrap());
        std::fs::metadata(path).unwrap().blocks() * 512
    }
}

pub fn populated(ram: &Process) -> Vec<u64> {
    let mut sets = PageSets::new(ram.layout());
    ram.populated(&mut sets).unwrap();
    pages(&sets[RAM])
}

pub fn pages(set: &PageSet) -> Vec<u64> {
    set.runs().flat_map(|run| run.first..run.end()).collect()
}

pub fn batch(pages: impl IntoIterator<Item = u64>) -> Batch {
    Batch { block: RAM, pages: pages.into_iter().collect() }
}

/// The first words of pages, as a channel reads them.
pub fn read(ram: &Process, batch: &Batch) -> Vec<u64> {
    let mut window = Window::new(batch.pages.len());
    let located = window.load(ram, batch).unwrap();
    let word = |place| {
        let mut page = [0; PAGE];
        located.page(place).copy_to(&mut page);
        u64::from_ne_bytes(page[..8].try_into().unwrap())
    };
    (0..batch.pages.len()).map(word).collect()
}

/// Puts pages in place as a channel does, each full of its word.
pub fn land(ram: &Process, batch: &Batch, word: impl Fn(u64) -> u64) {
    let mut window = Window::new(batch.pages.len());
    let mut bytes: Vec<u8> = Vec::new();
    for &page in &batch.pages {
        (0..PAGE / 8).for_each(|_| bytes.extend(word(page).to_ne_bytes()));
    }
    let mut spans = Vec::new();
    window.open(ram, batch).unwrap().gather(&mut spans);
    let mut from = 0;
    for span in &mut spans {
        // SAFETY: a span is writable for its length, and `bytes` has as many in all.
        unsafe { span.as_mut_ptr().copy_from_nonoverlapping(bytes[from..].as_ptr(), span.len()) };
        from += span.len();
    }
    assert_eq!(from, bytes.len());
    drop(spans);
    window.settle(ram, batch).unwrap();
}

pub fn zero(ram: &Process, pages: std::ops::Range<u64>) {
    ram.zero(RAM, Run { first: pages.start, count: pages.end - pages.start }).unwrap();
}
