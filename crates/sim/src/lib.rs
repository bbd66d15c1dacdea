//! A whole migration in one thread, from a seed: two VMs with a guest that checks itself, the real actors of both
//! ends stepped in an order that the seed draws, simulated links between them that carry the real bytes, and
//! faults. After every step an oracle looks whether any promise is broken. For tests only.
//!
//! ```
//! use whimbrel_sim::{End, Fault, Link, Moment, Pair, Seed};
//!
//! let mut pair = Pair::new(Seed(7)).with_endless_precopy();
//! pair.run_until(Moment::Round(2));
//! pair.inflict(Fault::Cut(Link::Channel(0)));
//! pair.run();
//! assert_eq!(pair.guest_runs_at(), Some(End::Source));
//! ```

mod fault;
mod frames;
mod guest;
mod log;
mod memory;
mod net;
mod oracle;
mod pair;
mod plan;
mod question;
mod source_end;
mod source_vm;
mod target_end;
mod target_vm;
mod tracker;
mod world;

pub use fault::{Fault, Planned, When};
pub use guest::Habits;
pub use log::Moment;
pub use memory::Backing;
pub use net::Link;
pub use oracle::{Rule, Violation};
pub use pair::Pair;
pub use plan::{BlockPlan, Plan};
pub use source_vm::SourceOp;
pub use target_vm::TargetOp;

use std::sync::{Arc, Mutex};

/// What a run is drawn from. The same seed gives the same run, step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(pub u64);

/// One of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Where the guest comes from.
    Source,
    /// Where it goes.
    Target,
}

impl End {
    /// The other side.
    pub fn other(self) -> Self {
        match self {
            Self::Source => Self::Target,
            Self::Target => Self::Source,
        }
    }
}

/// How something that whimbrel asks of a VM goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It fails, and nothing was done.
    Undone,
    /// It fails, but it was done all the same: an answer was lost.
    Done,
    /// Whimbrel is killed just before it.
    KilledBefore,
    /// Whimbrel is killed just after it.
    KilledAfter,
}

impl How {
    fn is_done(self) -> bool {
        matches!(self, Self::Done | Self::KilledAfter)
    }

    fn kills(self) -> bool {
        matches!(self, Self::KilledBefore | Self::KilledAfter)
    }
}

/// A defect put in on purpose, to see that the oracle finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The tracker reports only nine of ten written pages.
    TrackerForgets,
    /// Discards that no scan reports are not looked for at the stop.
    DiscardsAreMissed,
    /// Whimbrel is not told that there is direct I/O, so no clear is quiesced.
    DirectIoIsUnknown,
    /// Stopping the guest leaves direct I/O in flight.
    StopDoesNotDrain,
    /// The watchdog is not armed before the guest is stopped.
    WatchdogIsNotArmed,
    /// *Commit* is sent with the watchdog armed.
    CommitDoesNotDisarm,
    /// A channel of the target does not wait at a sync point.
    GateIsOpen,
    /// The target runs the guest when it is loaded, as a QEMU without `-S` might.
    TargetStartsAtLoad,
    /// The target does not make pages zero.
    ZeroesAreNotWritten,
    /// The target does not see what its RAM holds before the first page comes.
    StalePagesAreMissed,
    /// The source takes holes for data.
    HolesAreRead,
}

/// What several actors use, all on one thread. The real traits want locks.
pub(crate) type Shared<T> = Arc<Mutex<T>>;

pub(crate) fn shared<T>(value: T) -> Shared<T> {
    Arc::new(Mutex::new(value))
}
