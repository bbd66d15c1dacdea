//! The words of a migration's course at the source: what happened, what to do next, how it ended. Decides nothing.

use serde::Serialize;

/// Where the source stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Agreeing with the target, attaching to the VM.
    Setup,
    /// The guest runs and rounds are sent.
    Active,
    /// The guest is stopped; last pages and device state are on their way.
    Device,
    /// *Commit* was written. Only the target may run the guest, until it says that it never will.
    Committed,
    /// Undoing: the guest is being resumed.
    Resuming,
    /// Nothing is left to do.
    Ended,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The target agreed to the hello.
    Accepted,
    /// Writes are watched; every page that exists is pending.
    Armed {
        /// Pages to send in round 0.
        pages: u64,
    },
    /// Written pages were added to the pending ones.
    Collected {
        /// Pages now pending.
        pages: u64,
    },
    /// The channels have begun on the pending pages.
    Published,
    /// Every pending page is sent, and a sync point behind it on every channel.
    Flushed {
        /// Pages that carried data; the others were zero.
        pages: u64,
    },
    /// The guest is stopped, its block layer drained.
    Stopped,
    /// The device state is saved.
    Saved,
    /// The target was told that RAM is complete, and has been sent the device state.
    Finished,
    /// The target has loaded everything and waits.
    Ready,
    /// *Commit* is written.
    Committed,
    /// *Commit* may be written, and why nobody knows.
    CommitUnsure(String),
    /// The target runs the guest.
    Running,
    /// The target says that it will never run the guest.
    NeverRuns,
    /// The source QEMU has quit, or was left paused as asked.
    Retired,
    /// The guest runs at the source again.
    Resumed,
    /// The guest could not be resumed.
    NotResumed(String),
    /// Something broke.
    Failed(Failure),
    /// Something broke in a moment in which the guest was to stand still for a scan, and it may stand still yet.
    FailedQuiesced(Failure),
    /// The operator wants it to end.
    Cancelled,
}

/// Why a migration fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// This end, its VM or the kernel.
    Here(String),
    /// The target or the way to it.
    Peer(String),
    /// Precopy took longer than its timeout.
    NotConverging(String),
}

impl Failure {
    /// In words.
    pub fn reason(&self) -> &str {
        match self {
            Self::Here(reason) | Self::Peer(reason) | Self::NotConverging(reason) => reason,
        }
    }
}

/// The one thing to do next. Doing it leads to the event that its line names, or to [`Event::Failed`] or
/// [`Event::Cancelled`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Say hello and wait: `Accepted`.
    Greet,
    /// Borrow the userfaultfd, watch writes, find what exists: `Armed`.
    Arm {
        /// With a stop and a resume once writes are watched, so that direct I/O from before has ended.
        quiesced: bool,
    },
    /// Add what was written to the pending pages: `Collected`.
    Collect {
        /// Between a stop and a resume; then everything that direct I/O may have hidden becomes pending.
        quiesced: bool,
    },
    /// Give the pending pages to the channels: `Published`.
    Publish,
    /// Wait until they are sent: `Flushed`.
    Flush,
    /// Arm the watchdog and stop the guest: `Stopped`.
    Stop,
    /// Save the device state: `Saved`.
    Save,
    /// Say that RAM is complete, send hashes if asked, send the device state: `Finished`.
    Finish,
    /// Wait for the target: `Ready`.
    AwaitReady,
    /// Disarm the watchdog and write *commit*, as one: `Committed` or `CommitUnsure`; `Failed` only if not a byte
    /// was written. From the first byte on the guest is the target's.
    Commit,
    /// Wait for the target: `Running` or `NeverRuns`.
    AwaitRunning,
    /// Ask the target anew, on a connection of its own, what became of the guest: `Running` or `NeverRuns`.
    Ask,
    /// Confirm to the target and retire the source: `Retired`.
    Retire,
    /// Run the guest again and disarm the watchdog: `Resumed` or `NotResumed`.
    Resume,
    /// It is over. Close what is open.
    End(Outcome),
}

/// Which side may run the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Owner {
    /// The source runs it, as it did before.
    Source,
    /// The target runs it.
    Target,
    /// *Commit* was written and no answer came: nobody resumes it by himself.
    InDoubt,
    /// The source owns it but it could not be resumed.
    SourceStopped,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Which side may run the guest now.
    pub owner: Owner,
    /// Why it did not end at the target; none after a success or a cancel.
    pub failure: Option<Failure>,
    /// Whether the operator ended it.
    pub cancelled: bool,
}
