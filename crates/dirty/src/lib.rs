//! Which pages a running VM wrote. A tracker may report too much, never too little.

mod changes;
mod discards;
mod hint;
mod maps;
mod outside;
mod probe;
mod watched;

use ram::{PageSets, RamError};

pub use changes::Changes;
pub use outside::{Kvm, Options, Outside, Stats};
pub use probe::Probes;

/// Watches a VM's writes.
pub trait Tracker: Send {
    /// Starts watching: every write from now on is in the next [`Tracker::collect`]. Where direct I/O can be in
    /// flight, the VM must be stopped while this runs.
    fn arm(&mut self) -> Result<(), DirtyError>;

    /// Adds what was written or discarded since the last `collect` (or since `arm`), and watches it again.
    /// A page is to be read only after this returned: what is written later is in the next `collect`.
    fn collect(&mut self, into: &mut Changes) -> Result<(), DirtyError>;

    /// Adds pages of `sent` that were discarded without `collect` being able to see it. For the final stop; may be
    /// asked earlier too.
    fn reconcile(&mut self, sent: &PageSets, into: &mut Changes) -> Result<(), DirtyError>;
}

/// Why writes can't be watched.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DirtyError {
    #[error("{call} on RAM block {block} at {host:#x}, {bytes} bytes, in the VM's process")]
    Kernel { call: &'static str, block: String, host: u64, bytes: u64, source: std::io::Error },
    #[error("the source QEMU is gone: process {pid} has ended")]
    Gone { pid: i32 },
    #[error("the kernel cannot watch writes from outside: it takes Linux 6.7, on arm64 6.10")]
    Unsupported { source: std::io::Error },
    #[error("RAM block {block} is no longer mapped at {host:#x} in the VM's process")]
    Unmapped { block: String, host: u64 },
    #[error("RAM block {block} was mapped anew at {host:#x} in the VM's process: it was {was} and is {now}")]
    Remapped { block: String, host: u64, was: String, now: String },
    #[error("RAM block {block} at {host:#x} is no longer watched: the VM's process mapped some of it anew")]
    Unwatched { block: String, host: u64 },
    #[error("the file of RAM block {block} is mapped a second time, at {host:#x}: writes there are not seen")]
    Twice { block: String, host: u64 },
    #[error("cannot read the mappings of the VM's process {pid}")]
    Maps { pid: i32, source: std::io::Error },
    #[error("cannot try out write tracking on memory of our own")]
    Probe { source: std::io::Error },
    #[error(transparent)]
    Ram(#[from] RamError),
}
