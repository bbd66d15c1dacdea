//! What a migration asks of a VM at either end. QEMU is one; `guest` and `sim` have others.

use dirty::Tracker;
use ram::{Land, PageSets, Reach};
use std::error::Error;
use std::fmt::Write;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Whatever a VM failed with; it is only shown.
pub type Trouble = Box<dyn Error + Send + Sync>;

/// The VM at the source.
pub trait SourceVm: Send {
    /// Starts watching writes and finds every page that may hold data, in an order that loses none.
    /// `quiesced`: the guest is stopped for a moment once watching has begun, so that direct I/O from before ends.
    fn attach(&mut self, quiesced: bool, populated: &mut PageSets) -> Result<Attached, Trouble>;

    /// Stops the guest with its block layer drained; from then on it is resumed even if this process dies.
    fn stop(&mut self) -> Result<(), Trouble>;

    /// Runs the guest again, if it ran before. Called after `stop`, also after one that failed.
    fn resume(&mut self) -> Result<(), Trouble>;

    /// The state of all devices, the guest being stopped.
    fn save(&mut self) -> Result<Vec<u8>, Trouble>;

    /// Sends *commit*, as one step with giving up the right to resume: if this process dies in it, either the guest
    /// is resumed here or *commit* is on its way, never neither.
    fn commit(&mut self, line: &mut dyn CommitLine) -> Result<(), CommitError>;

    /// The target runs the guest; ends this VM, or leaves it stopped if the operator wants that.
    fn retire(&mut self) -> Result<(), Trouble>;
}

/// The way on which *commit* is sent. Nothing else is sent on it meanwhile.
pub trait CommitLine {
    /// Sends it from this process.
    fn send(&mut self) -> Result<(), Trouble>;

    /// The socket and the bytes, for a process that outlives this one to send them; none where there is no socket.
    fn socket(&self) -> Option<(BorrowedFd<'_>, &[u8])>;
}

/// Why *commit* was not sent.
#[derive(Debug)]
pub enum CommitError {
    /// Not a byte of it was: the guest is still the source's, and the watchdog still armed.
    Unsent(Trouble),
    /// Some of it may have been: the guest may be the target's.
    Unsure(Trouble),
}

/// A VM whose writes are watched. Dropping both parts leaves no trace in it.
pub struct Attached {
    /// Tells which pages were written.
    pub tracker: Box<dyn Tracker>,
    /// Reads them.
    pub ram: Arc<dyn Reach>,
}

/// The VM at the target, which waits for a migration.
pub trait TargetVm: Send {
    /// Loads the device state; the guest stays paused whatever its options were.
    fn load(&mut self, state: &[u8]) -> Result<(), Trouble>;

    /// Keeps on disk that *commit* arrived, before the guest runs.
    fn record_commit(&mut self) -> Result<(), Trouble>;

    /// Runs the guest, or leaves it paused if it was so at the source.
    fn start(&mut self) -> Result<(), StartError>;

    /// Ends the VM and returns when it can't run any more.
    fn end(&mut self) -> Result<(), Trouble>;

    /// Whether the VM has written to its RAM since this was last asked, though its guest did not run.
    fn has_written(&mut self) -> Result<bool, Trouble> {
        Ok(false)
    }
}

/// Why a guest was not started.
#[derive(Debug)]
pub enum StartError {
    /// The VM refused: the guest has not run, and will not.
    Refused(Trouble),
    /// It may run, or have run. What it wrote to its disks can't be taken back.
    Unsure(Trouble),
}

/// Whatever is not known to be a refusal leaves the matter open.
impl<E: Error + Send + Sync + 'static> From<E> for StartError {
    fn from(error: E) -> Self {
        Self::Unsure(error.into())
    }
}

/// RAM of a target: pages are put in place, and read again to verify them.
pub trait TargetRam: Land + Reach {}

impl<T: Land + Reach> TargetRam for T {}

/// An error and its causes in one line.
pub fn told(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}
