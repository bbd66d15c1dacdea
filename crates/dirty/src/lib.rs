//! Which pages a running VM wrote. A tracker may report too much, never too little.

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

/// Pages to send again. A page is in at most one of the two sets.
#[derive(Clone, Debug)]
pub struct Changes {
    /// Pages to be read and sent.
    pub data: PageSets,
    /// Pages that are holes now: zero, and not to be read, since that would allocate them.
    pub gone: PageSets,
}

/// Why writes can't be watched.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DirtyError {
    #[error("{call} on RAM block {block} at {host:#x}, {bytes} bytes, in the VM's process")]
    Kernel { call: &'static str, block: String, host: u64, bytes: u64, source: std::io::Error },
}
