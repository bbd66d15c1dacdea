//! RAM of a VM as plain memory, with what a kernel knows of it: which pages exist, and which were written since
//! they were last looked at. Knows nothing of what the pages mean.

#![expect(unsafe_code, reason = "lends pages as raw spans, as the RAM of a real VM is lent")]

use crate::Sabotage;
use ram::{Batch, BlockId, CopyBuf, Land, Layout, PAGE, PageSets, RamError, Reach, Run, Span, SpanMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

/// How a block is reached from outside, and what its kind of memory does not report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Copied out and in; a discard is reported as a write.
    Private,
    /// Read and written in place; a discard of a watched page is not reported, and reading a hole allocates it.
    Mapped,
}

/// What happens in the middle of a copy.
type Meanwhile = Box<dyn FnMut() + Send>;

/// RAM of a VM.
pub struct Memory {
    layout: Layout,
    backings: Vec<Backing>,
    bytes: CopyBuf,
    /// Where in `bytes` each block starts, in pages.
    firsts: Vec<usize>,
    state: Mutex<State>,
    meanwhile: Mutex<Option<Meanwhile>>,
    sabotage: Option<Sabotage>,
}

/// A page, counted over all blocks.
pub type Slot = usize;

struct State {
    populated: PageSets,
    /// Pages that existed when this was last asked to be remembered.
    before: PageSets,
    watch: Option<Watch>,
    discarded: PageSets,
    holes_read: u64,
    accesses_left: Option<u64>,
}

/// What was written or discarded since somebody looked.
struct Watch {
    written: PageSets,
    /// Discarded without a report.
    unseen: PageSets,
}

impl Memory {
    /// RAM without a page in it.
    pub(crate) fn new(layout: Layout, backings: Vec<Backing>, sabotage: Option<Sabotage>) -> Self {
        assert_eq!(layout.len(), backings.len(), "a backing for every block");
        let mut pages = 0;
        let mut firsts = vec![];
        for (_, block) in layout.iter() {
            firsts.push(pages);
            pages += block.pages() as usize;
        }
        let state = State {
            populated: PageSets::new(&layout),
            before: PageSets::new(&layout),
            watch: None,
            discarded: PageSets::new(&layout),
            holes_read: 0,
            accesses_left: None,
        };
        Self {
            bytes: CopyBuf::new(pages),
            firsts,
            backings,
            state: Mutex::new(state),
            meanwhile: Mutex::new(None),
            sabotage,
            layout,
        }
    }

    /// The blocks.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Pages of all blocks.
    pub fn slots(&self) -> usize {
        self.bytes.pages()
    }

    /// The block of a page, and its index there.
    pub fn place(&self, slot: Slot) -> (BlockId, u64) {
        let block = self.firsts.partition_point(|&first| first <= slot) - 1;
        (BlockId(block as u16), (slot - self.firsts[block]) as u64)
    }

    /// From now on this happens in the middle of copies.
    pub fn set_meanwhile(&self, meanwhile: impl FnMut() + Send + 'static) {
        *self.meanwhile.lock().expect("no holder panics") = Some(Box::new(meanwhile));
    }

    /// Lets happen what happens in the middle of a copy.
    pub fn meanwhile(&self) {
        let taken = self.meanwhile.lock().expect("no holder panics").take();
        if let Some(mut meanwhile) = taken {
            meanwhile();
            *self.meanwhile.lock().expect("no holder panics") = Some(meanwhile);
        }
    }

    /// The guest writes a page.
    pub fn write(&self, slot: Slot, page: &[u8; PAGE]) {
        self.fault_in(slot);
        self.put(slot, 0, page);
    }

    /// The guest, or a device for it, is about to write: the page comes into being and is reported.
    pub fn fault_in(&self, slot: Slot) {
        let (block, run) = self.run(slot);
        let mut state = self.lock();
        state.populated[block].insert(run);
        if let Some(watch) = &mut state.watch {
            watch.written[block].insert(run);
        }
    }

    /// A device writes a part of a page that it has pinned: nobody is told.
    pub fn write_pinned(&self, slot: Slot, at: usize, bytes: &[u8]) {
        self.put(slot, at, bytes);
    }

    /// The guest reads a page, which may be a hole.
    pub fn touch(&self, slot: Slot) {
        let (block, run) = self.run(slot);
        if self.backings[block.index()] == Backing::Mapped {
            self.lock().populated[block].insert(run);
        }
    }

    /// The guest gives a page back: it is a hole.
    pub fn discard(&self, slot: Slot) {
        let (block, run) = self.run(slot);
        self.put(slot, 0, &[0; PAGE]);
        let mut state = self.lock();
        state.populated[block].remove(run);
        state.discarded[block].insert(run);
        let Some(watch) = &mut state.watch else { return };
        match self.backings[block.index()] {
            Backing::Private => watch.written[block].insert(run),
            Backing::Mapped => watch.unseen[block].insert(run),
        }
    }

    /// The bytes of a page, to be looked at by nobody who counts as a reader.
    pub fn page(&self, slot: Slot) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        // SAFETY: a slot of the buffer is PAGE readable bytes, and nothing writes it meanwhile: one thread.
        unsafe { std::ptr::copy_nonoverlapping(self.bytes.slot(slot).as_ptr(), page.as_mut_ptr(), PAGE) };
        page
    }

    /// Whether the page exists.
    pub fn is_populated(&self, slot: Slot) -> bool {
        let (block, run) = self.run(slot);
        self.lock().populated[block].contains(run.first)
    }

    /// Remembers which pages exist now.
    pub fn remember(&self) {
        let mut state = self.lock();
        state.before = state.populated.clone();
    }

    /// Whether the page existed when that was remembered.
    pub fn existed(&self, slot: Slot) -> bool {
        let (block, run) = self.run(slot);
        self.lock().before[block].contains(run.first)
    }

    /// Whether the page was given back at some time.
    pub fn was_discarded(&self, slot: Slot) -> bool {
        let (block, run) = self.run(slot);
        self.lock().discarded[block].contains(run.first)
    }

    /// Starts watching writes.
    pub fn watch(&self) {
        let empty = || PageSets::new(&self.layout);
        self.lock().watch = Some(Watch { written: empty(), unseen: empty() });
    }

    /// Ends it and leaves no trace.
    pub fn unwatch(&self) {
        self.lock().watch = None;
    }

    /// Whether writes are watched.
    pub fn is_watched(&self) -> bool {
        self.lock().watch.is_some()
    }

    /// The first written page of a block from `from` on, and whether it exists. It is watched again.
    pub fn take_written(&self, block: BlockId, from: u64) -> Option<(u64, bool)> {
        let mut state = self.lock();
        let state = &mut *state;
        let written = &mut state.watch.as_mut().expect("watched while a tracker lives").written[block];
        let page = written.next_in(from)?;
        written.remove(Run { first: page, count: 1 });
        Some((page, state.populated[block].contains(page)))
    }

    /// Pages of `sent` whose discard nobody reported: holes now, and pages that came into being again.
    pub fn take_unseen(&self, sent: &PageSets, gone: &mut PageSets, data: &mut PageSets) {
        let mut state = self.lock();
        let State { populated, watch: Some(watch), .. } = &mut *state else { return };
        for (block, unseen) in watch.unseen.iter() {
            for page in unseen.runs().flat_map(|run| run.first..run.end()) {
                let run = Run { first: page, count: 1 };
                match populated[block].contains(page) {
                    true if sent[block].contains(page) => data[block].insert(run),
                    false if sent[block].contains(page) => gone[block].insert(run),
                    _ => {}
                }
            }
        }
        watch.unseen.clear();
    }

    /// Reads of holes that were holes all along.
    pub fn holes_read(&self) -> u64 {
        self.lock().holes_read
    }

    /// From now on it can be reached so many times, then never again.
    pub fn fail_after(&self, accesses: u64) {
        self.lock().accesses_left = Some(accesses);
    }

    fn run(&self, slot: Slot) -> (BlockId, Run) {
        let (block, first) = self.place(slot);
        (block, Run { first, count: 1 })
    }

    fn slot_of(&self, block: BlockId, page: u64) -> Slot {
        self.firsts[block.index()] + page as usize
    }

    fn put(&self, slot: Slot, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= PAGE, "{} bytes at {at} of a page", bytes.len());
        // SAFETY: the bytes stay inside the slot, as just checked; nothing else is at it meanwhile: one thread.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.bytes.slot(slot).as_ptr().add(at),
                bytes.len(),
            );
        }
    }

    fn access(&self) -> Result<(), RamError> {
        match &mut self.lock().accesses_left {
            Some(0) => Err(RamError::Gone { pid: 1 }),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn note_read(&self, block: BlockId, page: u64) {
        let mut state = self.lock();
        if !state.populated[block].contains(page) && !state.discarded[block].contains(page) {
            state.holes_read += 1;
        }
        if self.backings[block.index()] == Backing::Mapped {
            state.populated[block].insert(Run { first: page, count: 1 });
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

// SAFETY: pointers are to slots of `bytes`, which lives as long as `self`, or of `copy`.
unsafe impl Reach for Memory {
    fn locate(&self, batch: &Batch, copy: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError> {
        self.access()?;
        for (place, &page) in batch.pages.iter().enumerate() {
            self.note_read(batch.block, page);
            let slot = self.bytes.slot(self.slot_of(batch.block, page));
            match self.backings[batch.block.index()] {
                Backing::Mapped => at.push(slot),
                Backing::Private => {
                    copy_half(slot, copy.slot(place), 0);
                    self.meanwhile();
                    copy_half(slot, copy.slot(place), PAGE / 2);
                    at.push(copy.slot(place));
                }
            }
        }
        Ok(())
    }

    fn populated(&self, into: &mut PageSets) -> Result<(), RamError> {
        match self.sabotage {
            Some(Sabotage::StalePagesAreMissed) => {}
            Some(Sabotage::HolesAreRead) => self.layout.iter().for_each(|(block, facts)| {
                into[block].insert(Run { first: 0, count: facts.pages() });
            }),
            _ => into.union(&self.lock().populated),
        }
        Ok(())
    }
}

// SAFETY: as above.
unsafe impl Land for Memory {
    fn room(&self, batch: &Batch, copy: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError> {
        self.access()?;
        for (place, &first) in batch.pages.iter().enumerate() {
            match self.backings[batch.block.index()] {
                Backing::Mapped => {
                    self.lock().populated[batch.block].insert(Run { first, count: 1 });
                    at.push(self.bytes.slot(self.slot_of(batch.block, first)));
                }
                Backing::Private => at.push(copy.slot(place)),
            }
        }
        Ok(())
    }

    fn settle(&self, batch: &Batch, copy: &CopyBuf) -> Result<(), RamError> {
        if self.backings[batch.block.index()] == Backing::Mapped {
            return Ok(());
        }
        self.access()?;
        for (place, &first) in batch.pages.iter().enumerate() {
            self.lock().populated[batch.block].insert(Run { first, count: 1 });
            let slot = self.bytes.slot(self.slot_of(batch.block, first));
            copy_half(copy.slot(place), slot, 0);
            copy_half(copy.slot(place), slot, PAGE / 2);
        }
        Ok(())
    }

    fn zero(&self, block: BlockId, run: Run) -> Result<(), RamError> {
        self.access()?;
        if self.sabotage == Some(Sabotage::ZeroesAreNotWritten) {
            return Ok(());
        }
        for page in run.first..run.end() {
            self.put(self.slot_of(block, page), 0, &[0; PAGE]);
        }
        self.lock().populated[block].remove(run);
        Ok(())
    }
}

/// RAM that sends are made from: it goes on changing while its pages are copied.
pub(crate) type Live = Option<Arc<Memory>>;

/// Copies spans as a socket would: in pieces, with the guest at work in between.
pub(crate) fn gather(spans: &[Span<'_>], live: &Live) -> Vec<u8> {
    let mut bytes = vec![0; spans.iter().map(|span| span.len()).sum()];
    let mut rest = bytes.as_mut_slice();
    for span in spans {
        let mut done = 0;
        while done < span.len() {
            let len = (span.len() - done).min(PAGE / 2);
            let (piece, after) = rest.split_at_mut(len);
            // SAFETY: the piece lies inside the span, which is readable while it is borrowed.
            let from = unsafe { span.as_ptr().add(done) };
            // SAFETY: as above for `len` bytes; the destination is a slice of that length.
            unsafe { std::ptr::copy_nonoverlapping(from, piece.as_mut_ptr(), len) };
            rest = after;
            done += len;
            if let Some(memory) = live {
                memory.meanwhile();
            }
        }
    }
    bytes
}

/// Fills as much of the spans as there are bytes.
pub(crate) fn scatter(mut bytes: &[u8], spans: &mut [SpanMut<'_>]) {
    for span in spans {
        let len = bytes.len().min(span.len());
        // SAFETY: `len` is within both; the span is writable while it is borrowed.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), span.as_mut_ptr(), len) };
        bytes = &bytes[len..];
    }
}

fn copy_half(from: NonNull<u8>, to: NonNull<u8>, at: usize) {
    // SAFETY: both are pages of buffers that their callers hold; `at` is 0 or half a page.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().add(at), to.as_ptr().add(at), PAGE / 2) };
}

/// Whether two memories of the same blocks differ, and where first.
pub(crate) fn first_difference(one: &Memory, other: &Memory) -> Option<Slot> {
    (0..one.slots()).find(|&slot| one.page(slot) != other.page(slot))
}

/// A page that the target has and the source has not, for no good reason: the target had it before, or it was data
/// on its way. Both are zero by then.
pub(crate) fn first_excess(source: &Memory, target: &Memory) -> Option<Slot> {
    let in_excess = |slot: &Slot| {
        let excused = target.existed(*slot) || source.was_discarded(*slot);
        target.is_populated(*slot) && !source.is_populated(*slot) && !excused
    };
    (0..source.slots()).find(in_excess)
}
