//! What a migration asks of a VM at either end. QEMU is one; `guest` and `sim` have others.

use dirty::Tracker;
use ram::{Land, PageSets, Reach};
use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;

/// Whatever a VM failed with; it is only shown.
pub type Trouble = Box<dyn Error + Send + Sync>;

/// The VM at the source.
pub trait SourceVm: Send {
    /// Starts watching writes and finds every page that may hold data, in an order that loses none.
    /// `quiesced`: with no direct I/O in flight at the moment when watching starts.
    fn attach(&mut self, quiesced: bool, populated: &mut PageSets) -> Result<Attached, Trouble>;

    /// Stops the guest with its block layer drained; from then on it is resumed even if this process dies.
    fn stop(&mut self) -> Result<(), Trouble>;

    /// Runs the guest again, if it ran before. Called after `stop`, also after one that failed.
    fn resume(&mut self) -> Result<(), Trouble>;

    /// The state of all devices, the guest being stopped.
    fn save(&mut self) -> Result<Vec<u8>, Trouble>;

    /// The guest is about to be handed over: if this process dies from now on, the guest stays stopped.
    fn hand_over(&mut self) -> Result<(), Trouble>;

    /// The target runs the guest; ends this VM, or leaves it stopped if the operator wants that.
    fn retire(&mut self) -> Result<(), Trouble>;
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
    fn start(&mut self) -> Result<(), Trouble>;

    /// Ends the VM and returns when it can't run any more.
    fn end(&mut self) -> Result<(), Trouble>;
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
