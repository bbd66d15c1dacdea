//! A running, unmodified QEMU seen from outside: QMP, its RAM, a userfaultfd in it, its device state. The only
//! place that knows QEMU; decides nothing about a migration.

mod attach;
mod blocks;
pub mod check;
pub mod device;
mod faults;
pub mod guard;
mod maps;
mod process;
pub mod qmp;
mod stream;
mod vm;

pub use blocks::{BlocksError, OtherMapping, blocks, other_mappings};
pub use guard::Guard;
pub use vm::{Accelerator, Machine, RunState, Version, Vm, VmError};

/// Whatever went wrong with a QEMU, for callers that only pass it on.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each is documented where it is made")]
pub enum Error {
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error(transparent)]
    Qmp(#[from] qmp::QmpError),
    #[error(transparent)]
    Blocks(#[from] BlocksError),
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    #[error(transparent)]
    Stream(#[from] device::StreamError),
    #[error(transparent)]
    Guard(#[from] guard::GuardError),
}

/// An error with what it was caused by, in one line.
fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", with_cause(cause)),
        None => error.to_string(),
    }
}
