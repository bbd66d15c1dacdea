//! What the target's RAM holds while pages arrive: it does not start empty (firmware, `-kernel`, an earlier try), and
//! what it has may all be zero (memory that it was given in advance).
//!
//! Invariant: a page that is neither in `filled` nor being written reads as zero. So a zero page that was never
//! filled needs no write, and the target stays as sparse as the source.

use crate::Trouble;
use crate::sweep::Sweep;
use crate::vm::TargetRam;
use ram::{Batch, BlockId, Cursor, PageSets, Reach, Run};
use scan::Kernel;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard};

/// Which pages of the target may hold data, shared by all channels.
#[derive(Debug)]
pub struct Landing {
    kernel: Kernel,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Pages that may hold data.
    filled: PageSets,
    /// Pages that held data at the start and that the source has not announced: holes there, so zero here.
    stale: PageSets,
    /// Pages that exist since before the start and that nobody has looked at: they may be zero.
    unseen: PageSets,
}

impl Landing {
    /// Finds out what exists in the target's RAM before the first page arrives.
    pub fn new<R: Reach + ?Sized>(ram: &R, empty: PageSets, kernel: Kernel) -> Result<Self, Trouble> {
        let mut filled = empty;
        ram.populated(&mut filled)?;
        let (stale, unseen) = (filled.clone(), filled.clone());
        Ok(Self { kernel, state: Mutex::new(State { filled, stale, unseen }) })
    }

    /// Looks for pages that are zero already, until it has seen all or `goes_on` says no. May be done while pages
    /// arrive; what has not been looked at by then is looked at where it matters.
    pub fn look<R: Reach + ?Sized>(&self, ram: &R, goes_on: impl Fn() -> bool) -> Result<(), Trouble> {
        let mut sweep = self.sweep();
        let (mut cursor, mut batch, mut data) = (Cursor::default(), Batch::with_room(LOOK_PAGES), Vec::new());
        while goes_on() && cursor.fill(&self.lock().unseen, &mut batch, LOOK_PAGES) {
            data.clear();
            sweep.find(ram, batch.block, batch.pages.iter().copied(), &mut data)?;
            self.lock().see(&batch, &data);
        }
        Ok(())
    }

    /// These pages arrive with data.
    pub fn fill(&self, block: BlockId, pages: &[u64]) {
        let mut state = self.lock();
        for run in runs(pages) {
            state.filled[block].insert(run);
            state.stale[block].remove(run);
            state.unseen[block].remove(run);
        }
    }

    /// These pages are zero. Appends to `to_clear` those that may hold data here.
    pub fn empty(&self, block: BlockId, pages: &[u64], to_clear: &mut Vec<Run>) {
        let mut state = self.lock();
        for run in runs(pages) {
            state.stale[block].remove(run);
            state.unseen[block].remove(run);
            let filled = &mut state.filled[block];
            let mut from = run.first;
            while let Some(first) = filled.next_in(from).filter(|&first| first < run.end()) {
                from = filled.next_out(first).min(run.end());
                to_clear.push(Run { first, count: from - first });
            }
            filled.remove(run);
        }
    }

    /// Every page was announced that holds data at the source: makes zero what is left from before. Tells how many
    /// pages that were.
    pub fn settle<L: TargetRam + ?Sized>(&self, ram: &L) -> Result<u64, Trouble> {
        let mut state = self.lock();
        let state = &mut *state;
        let (mut sweep, mut data, mut cleared) = (self.sweep(), Vec::new(), 0);
        for (block, stale) in state.stale.iter() {
            data.clear();
            sweep.find(ram, block, stale.runs().flat_map(pages_of), &mut data)?;
            data.iter().try_for_each(|run| ram.zero(block, *run))?;
            cleared += data.iter().map(|run| run.count).sum::<u64>();
        }
        state.filled.subtract(&state.stale);
        state.stale.clear();
        state.unseen.clear();
        Ok(cleared)
    }

    /// Reads pages of a packet, or of as much as a packet usually has.
    pub(crate) fn sweep(&self) -> Sweep {
        Sweep::new(self.kernel, LOOK_PAGES)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

impl State {
    /// `batch` was looked at while only `data` of it was not zero. What has arrived meanwhile is not unseen any more,
    /// and stays what it is.
    fn see(&mut self, batch: &Batch, data: &[Run]) {
        let unseen = &mut self.unseen[batch.block];
        data.iter().for_each(|run| unseen.remove(*run));
        for run in runs(&batch.pages) {
            for page in pages_of(run).filter(|&page| unseen.contains(page)) {
                let page = Run { first: page, count: 1 };
                self.filled[batch.block].remove(page);
                self.stale[batch.block].remove(page);
            }
            unseen.remove(run);
        }
    }
}

/// A packet of the usual size.
const LOOK_PAGES: usize = 128;

/// The pages of a packet as runs.
fn runs(pages: &[u64]) -> impl Iterator<Item = Run> + '_ {
    pages.chunk_by(|page, next| *next == page + 1).map(|run| Run { first: run[0], count: run.len() as u64 })
}

fn pages_of(run: Run) -> Range<u64> {
    run.first..run.end()
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

#[cfg(test)]
#[expect(unsafe_code, reason = "lends pages of a buffer")]
mod tests {
    use super::*;
    use ram::{Block, CopyBuf, Land, Layout, PAGE, RamError};
    use std::ptr::NonNull;

    /// Pages that all exist. Counts those that are given back.
    struct Allocated {
        bytes: CopyBuf,
        given_back: Mutex<u64>,
    }

    const PAGES: u64 = 300;
    const BLOCK: BlockId = BlockId(0);

    impl Allocated {
        fn with_data_in(pages: &[u64]) -> Self {
            let ram = Self { bytes: CopyBuf::new(PAGES as usize), given_back: Mutex::new(0) };
            pages.iter().for_each(|&page| ram.write(page, 7));
            ram
        }

        fn write(&self, page: u64, byte: u8) {
            // SAFETY: the last byte of a page of the buffer, which nobody else uses at the time.
            unsafe { self.bytes.slot(page as usize).add(PAGE - 1).write(byte) }
        }

        fn byte(&self, page: u64) -> u8 {
            // SAFETY: as above.
            unsafe { self.bytes.slot(page as usize).add(PAGE - 1).read() }
        }

        fn given_back(&self) -> u64 {
            *self.given_back.lock().unwrap()
        }

        fn at(&self, batch: &Batch, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError> {
            at.extend(batch.pages.iter().map(|&page| self.bytes.slot(page as usize)));
            Ok(())
        }
    }

    // SAFETY: slots of a buffer that lives as long as `self`.
    unsafe impl Reach for Allocated {
        fn locate(&self, batch: &Batch, _: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError> {
            self.at(batch, at)
        }

        fn populated(&self, into: &mut PageSets) -> Result<(), RamError> {
            into[BLOCK].insert(Run { first: 0, count: PAGES });
            Ok(())
        }
    }

    // SAFETY: as above.
    unsafe impl Land for Allocated {
        fn room(&self, batch: &Batch, _: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError> {
            self.at(batch, at)
        }

        fn settle(&self, _: &Batch, _: &CopyBuf) -> Result<(), RamError> {
            Ok(())
        }

        fn zero(&self, _: BlockId, run: Run) -> Result<(), RamError> {
            pages_of(run).for_each(|page| self.write(page, 0));
            *self.given_back.lock().unwrap() += run.count;
            Ok(())
        }
    }

    fn landing(ram: &Allocated) -> Landing {
        let block = Block { name: "ram".into(), used_bytes: PAGES * PAGE as u64, page_bytes: PAGE as u64 };
        let layout = Layout::new(vec![block]).unwrap();
        Landing::new(ram, PageSets::new(&layout), Kernel::best()).unwrap()
    }

    fn announced_zero(landing: &Landing, pages: &[u64]) -> u64 {
        let mut to_clear = Vec::new();
        landing.empty(BLOCK, pages, &mut to_clear);
        to_clear.iter().map(|run| run.count).sum()
    }

    #[test]
    fn what_was_given_in_advance_is_kept_and_what_held_data_is_cleared() {
        for looks_before in [true, false] {
            let ram = Allocated::with_data_in(&[5, 200, 299]);
            let landing = landing(&ram);
            landing.look(&ram, || looks_before).unwrap();
            assert_eq!(landing.settle(&ram).unwrap(), 3);
            assert_eq!((ram.given_back(), ram.byte(5), ram.byte(200), ram.byte(299)), (3, 0, 0, 0));
        }
    }

    #[test]
    fn a_page_that_was_seen_to_be_zero_needs_nothing_when_it_is_announced_as_zero() {
        let ram = Allocated::with_data_in(&[5]);
        let landing = landing(&ram);
        assert_eq!(announced_zero(&landing, &[0, 1]), 2, "nobody has looked yet");
        landing.look(&ram, || true).unwrap();
        assert_eq!(announced_zero(&landing, &[2, 3, 4, 5, 6]), 1);
    }

    #[test]
    fn a_page_that_arrives_while_it_is_looked_at_counts_as_data() {
        let ram = Allocated::with_data_in(&[]);
        let landing = landing(&ram);
        let batch = Batch { block: BLOCK, pages: (0..10).collect() };
        // It was read as zero, then data arrived in it.
        landing.fill(BLOCK, &[3]);
        ram.write(3, 9);
        landing.lock().see(&batch, &[]);
        assert_eq!(announced_zero(&landing, &(0..10).collect::<Vec<_>>()), 1);
        landing.settle(&ram).unwrap();
        assert_eq!(ram.byte(3), 9);
    }
}
