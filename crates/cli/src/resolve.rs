//! `whimbrel resolve`: which side owns a VM after a commit that was never answered.

use crate::args::Resolve;
use crate::runtime::{End, Record};
use crate::{Exit, Stop};
use channel::Address;
use migrate::{source, told};
use qemu::Vm;
use wire::TargetState;

/// Runs the command.
pub fn run(args: &Resolve) -> Result<Exit, Stop> {
    let mut vm = Vm::connect(&args.qmp).map_err(Stop::qemu)?;
    let state = vm.run_state().map_err(Stop::qemu)?;
    let Some(record) = Record::of_qemu(vm.pid()) else {
        if args.start && !state.running {
            return start(&mut vm, None, "no migration is in doubt here");
        }
        println!("no migration of this QEMU is in doubt; its VM is {}", state.name);
        return Ok(Exit::Done);
    };
    match record.end {
        End::Source => at_source(args, &mut vm, &record),
        End::Target => at_target(args, &mut vm, &record, state.running),
    }
}

fn at_source(args: &Resolve, vm: &mut Vm, record: &Record) -> Result<Exit, Stop> {
    let target = record.target.clone().unwrap_or_default();
    let address: Address =
        target.parse().map_err(|_| Stop::failed(format!("the record names no target: {target:?}")))?;
    let state = source::ask(&address, record.session).map_err(|error| {
        let text = format!(
            "{} does not answer: {}\n    the VM stays paused here, since the target may run it",
            address,
            told(&*error)
        );
        Stop { exit: Exit::Person, text, next: Some(ASK_THERE.into()) }
    })?;
    match state {
        TargetState::Running => {
            let _ = record.forget();
            println!("the target owns the VM and runs it; this QEMU is to be ended");
            Ok(Exit::Done)
        }
        TargetState::NeverCommitted if args.start => start(vm, Some(record), "the target never took the VM"),
        TargetState::NeverCommitted => {
            println!(
                "the source owns the VM: the target never took it\n    next: whimbrel resolve --qmp {} --start",
                args.qmp.display()
            );
            Ok(Exit::Done)
        }
        TargetState::Committed | TargetState::Unknown => Err(Stop {
            exit: Exit::Person,
            text: format!("{address} can't tell ({state:?}); the VM stays paused here"),
            next: Some(ASK_THERE.into()),
        }),
    }
}

fn at_target(args: &Resolve, vm: &mut Vm, record: &Record, running: bool) -> Result<Exit, Stop> {
    match record.state {
        TargetState::Running | TargetState::Committed if running => {
            println!("the target owns the VM and runs it here; the source's QEMU is to be ended");
            Ok(Exit::Done)
        }
        TargetState::Running | TargetState::Committed if args.start => {
            start(vm, None, "the commit has come: the target owns the VM")
        }
        TargetState::Running | TargetState::Committed => {
            println!(
                "the target owns the VM, and it stands still here\n    next: whimbrel resolve --qmp {} --start",
                args.qmp.display()
            );
            Ok(Exit::Done)
        }
        TargetState::NeverCommitted | TargetState::Unknown => {
            println!(
                "the source owns the VM: no commit came here\n    next: at the source, whimbrel resolve --qmp SOCK --start"
            );
            Ok(Exit::Done)
        }
    }
}

fn start(vm: &mut Vm, record: Option<&Record>, why: &str) -> Result<Exit, Stop> {
    vm.cont().map_err(Stop::qemu)?;
    if let Some(record) = record {
        let _ = record.forget();
    }
    println!("{why}; it runs here now");
    Ok(Exit::Done)
}

const ASK_THERE: &str =
    "at the target: whimbrel resolve --qmp SOCK; if its host is lost for good, fence it, then `cont` here";
