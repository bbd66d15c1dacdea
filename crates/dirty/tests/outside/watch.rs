//! A child whose memory is tracked, and what the tests ask of it.

use crate::victim::{Kind, Memory, Victim, privileged};
use dirty::{Changes, DirtyError, Options, Outside, Tracker};
use ram::{Batch, BlockId, PAGE, PageSet, PageSets, Process, Window};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub const RAM: BlockId = BlockId(0);

pub struct Watch {
    pub tracker: Outside,
    pub ram: Arc<Process>,
    pub memory: Memory,
    pub victim: Victim,
    _turn: Turn,
}

/// Tests run side by side, but for one that moves pages of all processes about: the kernel then calls some written
/// that were not, which is allowed, and which no other test expects.
pub enum Turn {
    WithOthers { _guard: RwLockReadGuard<'static, ()> },
    Alone { _guard: RwLockWriteGuard<'static, ()> },
}

impl Turn {
    pub fn alone() -> Self {
        Self::Alone { _guard: TURN.write().unwrap_or_else(PoisonError::into_inner) }
    }

    fn with_others() -> Self {
        Self::WithOthers { _guard: TURN.read().unwrap_or_else(PoisonError::into_inner) }
    }
}

static TURN: RwLock<()> = RwLock::new(());

/// Pages that a round reported.
#[derive(Default, PartialEq, Eq)]
pub struct Round {
    pub data: Vec<u64>,
    pub gone: Vec<u64>,
}

impl std::fmt::Debug for Round {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "data {:?} gone {:?}", runs(&self.data), runs(&self.gone))
    }
}

fn runs(pages: &[u64]) -> Vec<std::ops::Range<u64>> {
    let chunks = pages.chunk_by(|page, next| page + 1 == *next);
    chunks.map(|chunk| chunk[0]..chunk[chunk.len() - 1] + 1).collect()
}

impl Round {
    pub fn nothing() -> Self {
        Self::default()
    }

    pub fn data(pages: impl IntoIterator<Item = u64>) -> Self {
        Self { data: pages.into_iter().collect(), gone: Vec::new() }
    }

    pub fn gone(pages: impl IntoIterator<Item = u64>) -> Self {
        Self { data: Vec::new(), gone: pages.into_iter().collect() }
    }
}

impl Watch {
    /// Maps memory in a child, lets `prepare` have it, and starts to track it. `None` where it can't be had here.
    pub fn new(kind: Kind, bytes: u64, prepare: impl FnOnce(&Victim, &Memory)) -> Option<Self> {
        Self::with(kind, bytes, Options::default(), prepare)
    }

    pub fn with(
        kind: Kind,
        bytes: u64,
        options: Options,
        prepare: impl FnOnce(&Victim, &Memory),
    ) -> Option<Self> {
        Self::in_turn(Turn::with_others(), kind, bytes, options, prepare)
    }

    pub fn in_turn(
        turn: Turn,
        kind: Kind,
        bytes: u64,
        options: Options,
        prepare: impl FnOnce(&Victim, &Memory),
    ) -> Option<Self> {
        if !privileged() {
            return None;
        }
        let victim = Victim::start();
        let memory = victim.map(kind, bytes)?;
        prepare(&victim, &memory);
        let ram = Process::source(victim.pid, &memory.layout, std::slice::from_ref(&memory.region)).unwrap();
        let ram = Arc::new(ram);
        let mut tracker = Outside::new(victim.uffd(), ram.clone(), options).unwrap();
        tracker.arm().unwrap();
        Some(Self { tracker, ram, memory, victim, _turn: turn })
    }

    pub fn populated(&mut self) -> Vec<u64> {
        let mut sets = PageSets::new(&self.memory.layout);
        self.tracker.populated(&mut sets).unwrap();
        pages(&sets[RAM])
    }

    pub fn collect(&mut self) -> Round {
        self.try_collect().unwrap()
    }

    pub fn try_collect(&mut self) -> Result<Round, DirtyError> {
        let mut changes = Changes::new(&self.memory.layout);
        self.tracker.collect(&mut changes)?;
        Ok(round(&changes))
    }

    /// What `reconcile` finds, if all of these pages were sent.
    pub fn reconcile(&mut self, sent: &[u64]) -> Round {
        let mut sets = PageSets::new(&self.memory.layout);
        sent.iter().for_each(|&first| sets[RAM].insert(ram::Run { first, count: 1 }));
        let mut changes = Changes::new(&self.memory.layout);
        self.tracker.reconcile(&sets, &mut changes).unwrap();
        round(&changes)
    }

    /// The first word of each page, read as a page to send is read.
    pub fn read(&self, pages: &[u64]) -> Vec<u64> {
        let mut window = Window::new(128);
        let mut words = Vec::new();
        for pages in pages.chunks(128) {
            let located = window.load(&*self.ram, &Batch { block: RAM, pages: pages.to_vec() }).unwrap();
            words.extend((0..pages.len()).map(|place| {
                let mut page = [0; PAGE];
                located.page(place).copy_to(&mut page);
                u64::from_ne_bytes(page[..8].try_into().unwrap())
            }));
        }
        words
    }

    pub fn store(&self, page: u64, count: u64, value: u64) {
        self.victim.store(self.memory.page(page), count * PAGE as u64, value);
    }

    pub fn load(&self, page: u64, count: u64) -> u64 {
        self.victim.load(self.memory.page(page), count * PAGE as u64)
    }

    pub fn madvise(&self, page: u64, count: u64, advice: i32) {
        self.victim.madvise(self.memory.page(page), count * PAGE as u64, advice).unwrap();
    }

    pub fn punch(&self, page: u64, count: u64) {
        let fd = self.memory.fd.expect("memory of a file");
        self.victim.punch(fd, page * PAGE as u64, count * PAGE as u64).unwrap();
    }
}

fn round(changes: &Changes) -> Round {
    Round { data: pages(&changes.data[RAM]), gone: pages(&changes.gone[RAM]) }
}

pub fn pages(set: &PageSet) -> Vec<u64> {
    set.runs().flat_map(|run| run.first..run.end()).collect()
}
