//! What the target's RAM holds while pages arrive: it does not start empty (firmware, `-kernel`, an earlier try).
//!
//! Invariant: a page that is neither in `filled` nor being written reads as zero. So a zero page that was never
//! filled needs no write, and the target stays as sparse as the source.

use crate::Trouble;
use ram::{BlockId, Land, PageSets, Reach, Run};
use std::sync::{Condvar, Mutex, MutexGuard};

/// Which pages of the target may hold data, shared by all channels.
#[derive(Debug)]
pub struct Landing {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Pages that may hold data.
    filled: PageSets,
    /// Pages that held data at the start and that the source has not announced: holes there, so zero here.
    stale: PageSets,
}

impl Landing {
    /// Looks at what the target's RAM holds before the first page arrives.
    pub fn new<R: Reach + ?Sized>(ram: &R, empty: PageSets) -> Result<Self, Trouble> {
        let mut filled = empty;
        ram.populated(&mut filled)?;
        let stale = filled.clone();
        Ok(Self { state: Mutex::new(State { filled, stale }) })
    }

    /// These pages arrive with data.
    pub fn fill(&self, block: BlockId, pages: &[u64]) {
        let mut state = self.lock();
        for run in runs(pages) {
            state.filled[block].insert(run);
            state.stale[block].remove(run);
        }
    }

    /// These pages are zero. Appends to `to_clear` those that hold data here.
    pub fn empty(&self, block: BlockId, pages: &[u64], to_clear: &mut Vec<Run>) {
        let mut state = self.lock();
        for run in runs(pages) {
            state.stale[block].remove(run);
            let filled = &mut state.filled[block];
            let mut from = run.first;
            while let Some(first) = filled.next_in(from).filter(|&first| first < run.end()) {
                from = filled.next_out(first).min(run.end());
                to_clear.push(Run { first, count: from - first });
            }
            filled.remove(run);
        }
    }

    /// Every page was announced that holds data at the source: makes zero what is left from before.
    pub fn settle<L: Land + ?Sized>(&self, ram: &L) -> Result<u64, Trouble> {
        let mut state = self.lock();
        let state = &mut *state;
        for (block, stale) in state.stale.iter() {
            stale.runs().try_for_each(|run| ram.zero(block, run))?;
        }
        let cleared = state.stale.len();
        state.filled.subtract(&state.stale);
        state.stale.clear();
        Ok(cleared)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

/// The pages of a packet as runs.
fn runs(pages: &[u64]) -> impl Iterator<Item = Run> + '_ {
    pages.chunk_by(|page, next| *next == page + 1).map(|run| Run { first: run[0], count: run.len() as u64 })
}

/// Holds every channel at a sync point until all have reached it, so that no page of a later round is put in
/// place before one of an earlier round.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    /// The last sync point that each channel has reached.
    reached: Vec<u64>,
    broken: bool,
}

impl Gate {
    /// A gate for this many channels.
    pub fn new(channels: u8) -> Self {
        let state = GateState { reached: vec![0; channels.into()], broken: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// `channel` has put everything before this sync point in place.
    pub fn reach(&self, channel: u8, sync: u64) {
        self.lock().reached[usize::from(channel)] = sync;
        self.changed.notify_all();
    }

    /// Whether every channel has reached the sync point.
    pub fn is_open(&self, sync: u64) -> bool {
        self.lock().is_open(sync)
    }

    /// Waits until every channel has reached the sync point. False if that will never be.
    pub fn pass(&self, sync: u64) -> bool {
        let state = self.lock();
        let state = self
            .changed
            .wait_while(state, |state| !state.broken && !state.is_open(sync))
            .expect("no holder panics");
        !state.broken
    }

    /// Lets everybody go: it is over.
    pub fn tear_down(&self) {
        self.lock().broken = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().expect("no holder panics")
    }
}

impl GateState {
    fn is_open(&self, sync: u64) -> bool {
        self.reached.iter().all(|&reached| reached >= sync)
    }
}
