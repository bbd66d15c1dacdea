//! One move and what it cost.

use crate::case::{Case, Memory};
use std::time::Duration;

/// Who moves the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// QEMU's own migration.
    Qemu,
    /// Whimbrel.
    Whimbrel,
}

impl Mover {
    /// In the order in which they take turns.
    pub const BOTH: [Mover; 2] = [Mover::Qemu, Mover::Whimbrel];

    /// As the record has it.
    pub fn name(self) -> &'static str {
        match self {
            Mover::Qemu => "qemu",
            Mover::Whimbrel => "whimbrel",
        }
    }
}

/// One move.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// What RAM held.
    pub case: Case,
    /// Where it lay.
    pub memory: Memory,
    /// Counts from 1.
    pub run: u32,
    /// Who moved it.
    pub mover: Mover,
    /// What it cost.
    pub cost: Cost,
}

/// What a move costs.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// From the command until the target may run, seen from outside.
    pub wall: Duration,
    /// The mover's own `total-time`, in milliseconds.
    pub total_ms: u64,
    /// CPU time of everything that it takes at both ends, guest excluded.
    pub cpu: Duration,
    /// From the source's stop to the target's start. None if the guest did not run.
    pub downtime: Option<Duration>,
    /// The mover's own `downtime`, in milliseconds.
    pub downtime_said_ms: u64,
}
