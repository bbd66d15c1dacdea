//! `whimbrel check`.

use crate::args::Check;
use crate::{Exit, Stop};
use qemu::Vm;

/// Runs the command.
pub fn run(args: &Check) -> Result<Exit, Stop> {
    let _ = args;
    Ok(Exit::Done)
}

/// Refuses a VM that can't be moved, by the first reason. Gives the block nodes that use direct I/O.
pub fn require_movable(vm: &mut Vm) -> Result<Vec<String>, Stop> {
    vm.direct_io_nodes().map_err(Stop::qemu)
}

/// Refuses a QEMU that does not wait for a migration.
pub fn require_waiting(vm: &mut Vm) -> Result<(), Stop> {
    match vm.is_waiting().map_err(Stop::qemu)? {
        true => Ok(()),
        false => Err(Stop::failed("this QEMU does not wait for a migration")
            .next("start it with the same options as the source, and -incoming defer")),
    }
}
