//! Where the threads around a main actor leave their notes for it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// A queue of notes that its reader can wait at.
#[derive(Debug)]
pub struct Inbox<N> {
    notes: Mutex<VecDeque<N>>,
    came: Condvar,
}

impl<N> Default for Inbox<N> {
    fn default() -> Self {
        Self { notes: Mutex::new(VecDeque::new()), came: Condvar::new() }
    }
}

impl<N> Inbox<N> {
    /// Leaves a note.
    pub fn put(&self, note: N) {
        self.notes.lock().expect("no holder panics").push_back(note);
        self.came.notify_one();
    }

    /// The oldest note.
    pub fn take(&self) -> Option<N> {
        self.notes.lock().expect("no holder panics").pop_front()
    }

    /// Waits until there is a note, at most this long.
    pub fn wait(&self, time_max: Duration) {
        let notes = self.notes.lock().expect("no holder panics");
        let _ = self.came.wait_timeout_while(notes, time_max, |notes| notes.is_empty());
    }
}
