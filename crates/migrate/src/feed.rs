//! The round at hand, and who sends which part of it. Each channel takes the next packet's pages when it is ready
//! for them, so a slow channel holds up no more than the area that it is in.
//!
//! Invariant: a page is given out at most once a round, and a channel gets the round's sync point only when every
//! page has been given out or is in the area of another channel, which gives it out before its own sync point; so a
//! newer copy of a page is never overtaken by an older one.

use dirty::Changes;
use engine::ZeroPageDetection;
use ram::{Area, Batch, Cursor, Layout};
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};

/// Pages for one packet and what is known about them.
#[derive(Clone, Debug)]
pub struct Parcel {
    /// The pages.
    pub batch: Batch,
    /// What is known about them.
    pub kind: Kind,
}

impl Parcel {
    /// An empty parcel with room for `pages_max` pages.
    pub fn with_room(pages_max: usize) -> Self {
        Self { batch: Batch::with_room(pages_max), kind: Kind::Check }
    }
}

/// What is known about the pages of a parcel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing: look for zero pages.
    Check,
    /// They are sent as they are.
    Plain,
    /// They are holes or were found to be zero: announced, not read.
    Zero,
}

/// What a channel is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Send the parcel.
    Send,
    /// Send a sync point, the n-th of this channel.
    Sync(u64),
    /// Nothing now.
    Wait,
    /// Nothing ever again.
    Stop,
}

/// Gives the pages of a round to whichever channel asks.
#[derive(Debug)]
pub struct Feed {
    state: Mutex<State>,
    changed: Condvar,
    detection: ZeroPageDetection,
    packet_pages: usize,
}

#[derive(Debug)]
struct State {
    round: Changes,
    data: Cursor,
    gone: Cursor,
    /// Where each channel takes its pages of `data`: what is done once for an area is done by one of them, and the
    /// others need not wait for it.
    areas: Vec<Area>,
    left_pages: u64,
    /// The sync point that ends the round at hand: the number of rounds so far.
    sync: u64,
    /// The last sync point that each channel has taken, and the last that it has sent.
    taken: Vec<u64>,
    sent: Vec<u64>,
    /// `legacy` only: what the main thread has looked at, and empty parcels to use again.
    sorted: VecDeque<Parcel>,
    spare: Vec<Parcel>,
    sorting: bool,
    stopped: bool,
}

impl Feed {
    /// No round yet, for this many channels.
    pub fn new(layout: &Layout, channels: u8, packet_pages: usize, detection: ZeroPageDetection) -> Self {
        let state = State {
            round: Changes::new(layout),
            data: Cursor::default(),
            gone: Cursor::default(),
            areas: vec![Area::default(); channels.into()],
            left_pages: 0,
            sync: 0,
            taken: vec![0; channels.into()],
            sent: vec![0; channels.into()],
            sorted: VecDeque::new(),
            spare: vec![Parcel::with_room(packet_pages); SORTED_PER_CHANNEL * usize::from(channels)],
            sorting: false,
            stopped: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), detection, packet_pages }
    }

    /// Begins a round with `pending`, which comes back empty. The round before must be flushed.
    pub fn publish(&self, pending: &mut Changes) {
        let mut state = self.lock();
        assert!(state.is_flushed(), "a round is published only behind the sync point of the one before");
        std::mem::swap(&mut state.round, pending);
        state.left_pages = state.round.len();
        (state.data, state.gone) = (Cursor::default(), Cursor::default());
        state.sync += 1;
        state.sorting = self.detection == ZeroPageDetection::Legacy;
        drop(state);
        self.changed.notify_all();
        pending.clear();
    }

    /// What `channel` is to do next; for [`Work::Send`] the parcel is filled.
    pub fn take(&self, channel: u8, parcel: &mut Parcel) -> Work {
        self.next(&mut self.lock(), channel, parcel)
    }

    /// As [`Feed::take`], but waits until there is something.
    pub fn wait(&self, channel: u8, parcel: &mut Parcel) -> Work {
        let mut state = self.lock();
        loop {
            match self.next(&mut state, channel, parcel) {
                Work::Wait => state = self.changed.wait(state).expect("no holder panics"),
                work => return work,
            }
        }
    }

    /// `channel` has sent the sync point that it took.
    pub fn synced(&self, channel: u8) {
        let mut state = self.lock();
        let channel = usize::from(channel);
        state.sent[channel] = state.taken[channel];
    }

    /// Whether every channel has sent the sync point of the round at hand.
    pub fn is_flushed(&self) -> bool {
        self.lock().is_flushed()
    }

    /// The number of sync points that every channel has been given so far.
    pub fn syncs(&self) -> u64 {
        self.lock().sync
    }

    /// Pages of the round at hand that no channel has taken yet.
    pub fn left_pages(&self) -> u64 {
        self.lock().left_pages
    }

    /// Channels that ask from now on are told to stop.
    pub fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Pages of a packet, at most.
    pub fn packet_pages(&self) -> usize {
        self.packet_pages
    }

    /// `legacy`: fills `batch` with pages for the main thread to look at. False when it has seen the whole round,
    /// or when the channels have enough to do.
    pub fn take_unsorted(&self, batch: &mut Batch) -> bool {
        let mut state = self.lock();
        let state = &mut *state;
        if !state.sorting || state.spare.len() < 2 {
            return false;
        }
        state.sorting = state.data.fill(&state.round.data, batch, self.packet_pages);
        if !state.sorting {
            self.changed.notify_all();
        }
        state.sorting
    }

    /// `legacy`: gives the channels pages that the main thread has looked at.
    pub fn put_sorted(&self, kind: Kind, batch: &Batch, pages: &[u64]) {
        let mut state = self.lock();
        let mut parcel = state.spare.pop().expect("take_unsorted left room for two parcels");
        parcel.kind = kind;
        parcel.batch.block = batch.block;
        parcel.batch.pages.clear();
        parcel.batch.pages.extend(pages);
        match parcel.batch.pages.is_empty() {
            true => state.spare.push(parcel),
            false => state.sorted.push_back(parcel),
        }
        drop(state);
        self.changed.notify_one();
    }

    fn next(&self, state: &mut State, channel: u8, parcel: &mut Parcel) -> Work {
        if state.stopped {
            return Work::Stop;
        }
        if state.taken[usize::from(channel)] == state.sync {
            return Work::Wait;
        }
        if self.fill(state, channel, parcel) {
            state.left_pages -= parcel.batch.pages.len() as u64;
            return Work::Send;
        }
        if state.sorting {
            return Work::Wait;
        }
        state.taken[usize::from(channel)] = state.sync;
        Work::Sync(state.sync)
    }

    fn fill(&self, state: &mut State, channel: u8, parcel: &mut Parcel) -> bool {
        let data = match self.detection {
            ZeroPageDetection::Legacy => state.unload(parcel),
            ZeroPageDetection::None => state.fill_data(channel, parcel, Kind::Plain, self.packet_pages),
            ZeroPageDetection::Multifd => state.fill_data(channel, parcel, Kind::Check, self.packet_pages),
        };
        data || state.fill_gone(parcel, self.packet_pages)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

impl State {
    fn is_flushed(&self) -> bool {
        self.sent.iter().all(|&sent| sent == self.sync)
    }

    fn fill_data(&mut self, channel: u8, parcel: &mut Parcel, kind: Kind, pages_max: usize) -> bool {
        parcel.kind = kind;
        let area = &mut self.areas[usize::from(channel)];
        self.data.fill_from(area, &self.round.data, &mut parcel.batch, pages_max)
    }

    fn fill_gone(&mut self, parcel: &mut Parcel, pages_max: usize) -> bool {
        parcel.kind = Kind::Zero;
        self.gone.fill(&self.round.gone, &mut parcel.batch, pages_max)
    }

    fn unload(&mut self, parcel: &mut Parcel) -> bool {
        let Some(mut sorted) = self.sorted.pop_front() else { return false };
        std::mem::swap(parcel, &mut sorted);
        self.spare.push(sorted);
        true
    }
}

/// `legacy`: parcels that lie ready for each channel. Four keep it busy while the main thread looks at the next.
const SORTED_PER_CHANNEL: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use ram::{Block, BlockId, PAGE, Run};

    fn layout(pages: u64) -> Layout {
        let block = Block { name: "ram".into(), used_bytes: pages * PAGE as u64, page_bytes: PAGE as u64 };
        Layout::new(vec![block]).unwrap()
    }

    fn changes(layout: &Layout, data: Run, gone: Run) -> Changes {
        let mut changes = Changes::new(layout);
        changes.data[BlockId(0)].insert(data);
        changes.gone[BlockId(0)].insert(gone);
        changes
    }

    #[test]
    fn a_round_gives_every_page_once_and_then_a_sync_to_each_channel() {
        let layout = layout(100);
        let feed = Feed::new(&layout, 2, 16, ZeroPageDetection::Multifd);
        let mut parcel = Parcel::with_room(16);
        assert_eq!(feed.take(0, &mut parcel), Work::Wait);
        feed.publish(&mut changes(&layout, Run { first: 0, count: 40 }, Run { first: 60, count: 5 }));
        let mut seen = vec![];
        for channel in [0, 1, 0, 0] {
            assert_eq!(feed.take(channel, &mut parcel), Work::Send);
            seen.extend(parcel.batch.pages.iter().map(|&page| (page, parcel.kind)));
        }
        seen.sort_by_key(|&(page, _)| page);
        let data = (0..40).map(|page| (page, Kind::Check));
        let wanted: Vec<_> = data.chain((60..65).map(|page| (page, Kind::Zero))).collect();
        assert_eq!(seen, wanted);
        assert_eq!(feed.left_pages(), 0);
        assert_eq!(feed.take(0, &mut parcel), Work::Sync(1));
        feed.synced(0);
        assert!(!feed.is_flushed(), "the other channel has not passed the sync point");
        assert_eq!(feed.take(1, &mut parcel), Work::Sync(1));
        feed.synced(1);
        assert!(feed.is_flushed());
    }

    #[test]
    fn a_channel_may_sync_while_another_has_pages_left_in_its_area() {
        let layout = layout(1024);
        let feed = Feed::new(&layout, 2, 256, ZeroPageDetection::Multifd);
        let mut parcel = Parcel::with_room(256);
        feed.publish(&mut changes(&layout, Run { first: 0, count: 1024 }, Run { first: 0, count: 0 }));
        assert_eq!(feed.take(0, &mut parcel), Work::Send);
        for first in [512, 768] {
            assert_eq!(feed.take(1, &mut parcel), Work::Send);
            assert_eq!(parcel.batch.pages[0], first);
        }
        assert_eq!(feed.take(1, &mut parcel), Work::Sync(1));
        assert_eq!(feed.take(0, &mut parcel), Work::Send);
        assert_eq!(parcel.batch.pages[0], 256);
        assert_eq!(feed.take(0, &mut parcel), Work::Sync(1));
    }

    #[test]
    fn legacy_gives_out_only_what_the_main_thread_has_looked_at() {
        let layout = layout(100);
        let feed = Feed::new(&layout, 1, 16, ZeroPageDetection::Legacy);
        let (mut parcel, mut batch) = (Parcel::with_room(16), Batch::with_room(16));
        feed.publish(&mut changes(&layout, Run { first: 0, count: 16 }, Run { first: 60, count: 1 }));
        assert!(feed.take_unsorted(&mut batch));
        feed.put_sorted(Kind::Zero, &batch, &[1, 3]);
        feed.put_sorted(Kind::Plain, &batch, &[]);
        assert_eq!(feed.take(0, &mut parcel), Work::Send);
        assert_eq!((parcel.kind, parcel.batch.pages.as_slice()), (Kind::Zero, &[1, 3][..]));
        assert!(!feed.take_unsorted(&mut batch), "the round is seen");
        assert_eq!(feed.take(0, &mut parcel), Work::Send);
        assert_eq!(parcel.batch.pages, [60]);
        assert_eq!(feed.take(0, &mut parcel), Work::Sync(1));
    }

    #[test]
    fn a_stopped_feed_sends_everybody_home() {
        let layout = layout(1);
        let feed = Feed::new(&layout, 1, 16, ZeroPageDetection::None);
        feed.stop();
        assert_eq!(feed.wait(0, &mut Parcel::with_room(16)), Work::Stop);
    }
}
