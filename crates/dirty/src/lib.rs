//! Which pages a running VM wrote. A tracker may report too much, never too little.

mod changes;

pub use changes::Changes;
use ram::PageSets;

/// Watches a VM's writes.
pub trait Tracker: Send {
    /// Starts watching: every write from now on is in the next [`Tracker::collect`]. Where direct I/O can be in
    /// flight, the VM must be stopped while this runs.
    fn arm(&mut self) -> Result<(), DirtyError>;

    /// Adds what was written or discarded since the last `collect` (or since `arm`), and watches it again.
    /// A page is to be read only after this returned: what is written later is in the next `collect`.
    fn collect(&mut self, into: &mut Changes) -> Result<(), DirtyError>;

    /// Adds pages of `sent` that were discarded without `collect` being able to see it. For the final stop.
    fn reconcile(&mut self, sent: &PageSets, into: &mut Changes) -> Result<(), DirtyError>;
}

/// Why writes can't be watched.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DirtyError {
    #[error("{call} on RAM block {block} at {host:#x}, {bytes} bytes, in the VM's process")]
    Kernel { call: &'static str, block: String, host: u64, bytes: u64, source: std::io::Error },
}
