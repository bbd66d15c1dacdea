//! Waiting with an end. Knows nothing of what is awaited.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long anything may take that takes a second or two on an idle machine. Two busy cores and a KVM that
/// emulates firmware need the rest.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Polls until `found` gives something. Nothing came within `deadline`: `None`.
pub fn wait_until<T>(deadline: Duration, mut found: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + deadline;
    loop {
        // Asked before the time is looked at, so that a late wake-up does not lose what is there.
        let last = Instant::now() >= end;
        if let Some(value) = found() {
            return Some(value);
        }
        if last {
            return None;
        }
        sleep(POLL);
    }
}

const POLL: Duration = Duration::from_millis(5);
