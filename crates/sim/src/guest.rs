//! A guest that checks itself: it knows what each of its pages must hold. Its knowledge travels as device state,
//! so that it finds a page that was lost on the way.

use crate::memory::{Memory, Slot};
use ram::PAGE;
use std::sync::Arc;

/// What a guest does, and how often, in parts of all it does.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// Writes a page.
    pub write: u32,
    /// Fills a page with zeros.
    pub zero: u32,
    /// Gives a page back.
    pub discard: u32,
    /// Reads a page, which may be a hole.
    pub touch: u32,
    /// Has a disk read into a page by direct I/O.
    pub direct_io: u32,
    /// Pages that most of this happens to.
    pub hot_pages: usize,
    /// Acts after which it does only one in a hundred.
    pub calm_after: u64,
}

/// A guest.
pub struct Guest {
    memory: Arc<Memory>,
    random: fastrand::Rng,
    habits: Habits,
    running: bool,
    acts: u64,
    generation: u64,
    /// The generation that each page holds; 0 is zeros.
    contents: Vec<u64>,
    in_flight: Vec<Transfer>,
}

/// A page that a device writes.
struct Transfer {
    slot: Slot,
    generation: u64,
    half_done: bool,
}

/// A page that does not hold what it must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Which page.
    pub slot: Slot,
    /// What it should hold; 0 is zeros.
    pub generation: u64,
}

impl Guest {
    /// A guest whose RAM holds something already.
    pub fn new(memory: Arc<Memory>, habits: Habits, mut random: fastrand::Rng) -> Self {
        let contents = vec![0; memory.slots()];
        let mut guest = Self {
            contents,
            random: random.fork(),
            habits,
            running: false,
            acts: 0,
            generation: 0,
            in_flight: vec![],
            memory,
        };
        for slot in 0..guest.contents.len() {
            match random.u8(..4) {
                0 => guest.fill(slot, 0),
                1 | 2 => guest.write(slot),
                _ => {}
            }
        }
        guest
    }

    /// A guest that goes on where another stopped. None if the state is not one of a guest.
    pub fn restore(memory: Arc<Memory>, habits: Habits, random: fastrand::Rng, state: &[u8]) -> Option<Self> {
        let (words, rest) = state.as_chunks();
        let words: Vec<u64> = words.iter().copied().map(u64::from_le_bytes).collect();
        let (&check, words) = words.split_last()?;
        let (&generation, contents) = words.split_first()?;
        if !rest.is_empty() || digest(words) != check || contents.len() != memory.slots() {
            return None;
        }
        let contents = contents.to_vec();
        Some(Self {
            contents,
            random,
            habits,
            running: false,
            acts: 0,
            generation,
            in_flight: vec![],
            memory,
        })
    }

    /// What the guest knows, for [`Guest::restore`].
    pub fn state(&self) -> Vec<u8> {
        let mut words = vec![self.generation];
        words.extend(&self.contents);
        words.push(digest(&words));
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    /// Whether it runs.
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// Runs or stops it. What devices are doing goes on until [`Guest::drain`].
    pub fn set_running(&mut self, running: bool) {
        self.running = running;
    }

    /// Ends everything that devices are doing.
    pub fn drain(&mut self) {
        while let Some(transfer) = self.in_flight.pop() {
            self.finish(&transfer);
        }
    }

    /// Does one thing, if it runs.
    pub fn act(&mut self) {
        if !self.running {
            return;
        }
        self.acts += 1;
        if self.acts > self.habits.calm_after && self.random.u8(..100) > 0 {
            return;
        }
        let Habits { write, zero, discard, touch, direct_io, .. } = self.habits;
        let mut die = self.random.u32(..write + zero + discard + touch + 2 * direct_io);
        let mut is = |parts: u32| {
            let hit = die < parts;
            die = die.wrapping_sub(parts);
            hit
        };
        let (write, zero, discard, touch) = (is(write), is(zero), is(discard), is(touch));
        if !(write || zero || discard || touch) {
            return self.transfer();
        }
        let slot = self.pick();
        if self.in_flight.iter().any(|transfer| transfer.slot == slot) {
            return;
        }
        if write {
            self.write(slot);
        } else if zero {
            self.fill(slot, 0);
        } else if discard {
            self.memory.discard(slot);
            self.contents[slot] = 0;
        } else {
            self.memory.touch(slot);
        }
    }

    /// Does something now and then.
    pub fn act_now_and_then(&mut self) {
        if self.running && self.random.u8(..32) == 0 {
            self.act();
        }
    }

    /// Looks at every page.
    pub fn check(&self) -> Result<(), Lost> {
        let mut page = [0; PAGE];
        for (slot, &generation) in self.contents.iter().enumerate() {
            if self.in_flight.iter().any(|transfer| transfer.slot == slot) {
                continue;
            }
            pattern(slot, generation, &mut page);
            if self.memory.page(slot) != page {
                return Err(Lost { slot, generation });
            }
        }
        Ok(())
    }

    /// Writes a page, also while stopped, as a device does whose state is being saved.
    pub fn write(&mut self, slot: Slot) {
        self.generation += 1;
        self.fill(slot, self.generation);
    }

    fn fill(&mut self, slot: Slot, generation: u64) {
        let mut page = [0; PAGE];
        pattern(slot, generation, &mut page);
        self.memory.write(slot, &page);
        self.contents[slot] = generation;
    }

    /// Begins a transfer, or moves one on.
    fn transfer(&mut self) {
        if self.in_flight.len() < TRANSFERS_MAX && self.random.bool() {
            let slot = self.pick();
            if self.in_flight.iter().all(|transfer| transfer.slot != slot) {
                self.generation += 1;
                self.memory.fault_in(slot);
                self.in_flight.push(Transfer { slot, generation: self.generation, half_done: false });
            }
        } else if !self.in_flight.is_empty() {
            let at = self.random.usize(..self.in_flight.len());
            let transfer = &mut self.in_flight[at];
            if transfer.half_done {
                let transfer = self.in_flight.swap_remove(at);
                self.finish(&transfer);
            } else {
                transfer.half_done = true;
                let mut page = [0; PAGE];
                pattern(transfer.slot, transfer.generation, &mut page);
                self.memory.write_pinned(transfer.slot, 0, &page[..PAGE / 2]);
            }
        }
    }

    fn finish(&mut self, transfer: &Transfer) {
        let mut page = [0; PAGE];
        pattern(transfer.slot, transfer.generation, &mut page);
        self.memory.write_pinned(transfer.slot, 0, &page);
        self.contents[transfer.slot] = transfer.generation;
    }

    fn pick(&mut self) -> Slot {
        let slots = self.contents.len();
        let hot = self.habits.hot_pages.clamp(1, slots);
        match self.random.u8(..8) {
            0 => self.random.usize(..slots),
            _ => self.random.usize(..hot) * 7 % slots,
        }
    }
}

/// What a page of this generation holds.
fn pattern(slot: Slot, generation: u64, page: &mut [u8; PAGE]) {
    if generation == 0 {
        page.fill(0);
        return;
    }
    let mut word = generation << 32 ^ slot as u64;
    let (words, _) = page.as_chunks_mut();
    for bytes in words {
        word = word.wrapping_mul(MULTIPLIER).wrapping_add(1);
        *bytes = word.to_le_bytes();
    }
}

fn digest(words: &[u64]) -> u64 {
    words.iter().fold(MULTIPLIER, |sum, word| (sum ^ word).wrapping_mul(MULTIPLIER).rotate_left(23))
}

/// Odd and without a pattern of its own: the golden ratio's fraction.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// A disk's queue; a few are enough to have one in flight at most clears.
const TRANSFERS_MAX: usize = 4;
