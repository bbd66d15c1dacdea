//! `whimbrel receive`: takes a VM into a QEMU that waits.

use crate::args::Receive;
use crate::runtime::{End, Lock, Record};
use crate::send::{offer, require_local};
use crate::target_vm::QemuTarget;
use crate::{Exit, Stop, check, signals};
use channel::Listener;
use engine::TargetOutcome;
use migrate::{Inbox, Status, target};
use qemu::Vm;
use ram::Process;
use scan::Kernel;
use serde_json::json;
use std::sync::{Arc, Mutex};
use wire::{Hello, Session, TargetState};

/// Runs the command.
pub fn run(args: Receive) -> Result<Exit, Stop> {
    require_local(&args.address, args.insecure)?;
    let _lock = Lock::take(&args.qmp)?;
    let mut vm = Vm::connect(&args.qmp).map_err(Stop::qemu)?;
    check::require_waiting(&mut vm)?;
    let machine = vm.machine().map_err(Stop::qemu)?;
    let (layout, regions) = qemu::blocks(&mut vm).map_err(Stop::qemu)?;
    let ram = Arc::new(Process::target(vm.pid(), &layout, &regions).map_err(Stop::qemu)?);
    let offer = offer(&vm, &machine, layout);
    let listener = Listener::bind(&args.address)
        .map_err(|error| Stop::qemu(error).next("another address; port 0 takes a free port"))?;
    let (inbox, status) = (Arc::new(Inbox::default()), Arc::new(Mutex::new(Status::default())));
    signals::cancel_on_signals(&inbox).map_err(|error| Stop::failed(error.to_string()))?;
    eprintln!("listening on {}", listener.address());
    let agreed = Arc::new(Mutex::new(None));
    let ended = target::run(
        &listener,
        target::Setup {
            vm: Box::new(QemuTarget { vm, machine, agreed: agreed.clone() }),
            ram: ram.clone(),
            offer,
            kernel: Kernel::best(),
            inbox,
            status: status.clone(),
            agreed: Box::new(move |hello: &Hello| {
                eprintln!("receiving {} from whimbrel {}, QEMU {}", hello.machine, hello.version, hello.qemu);
                *agreed.lock().expect("no holder panics") = Some(hello.clone());
            }),
            recall: Box::new(recall),
        },
    );
    let status = status.lock().expect("no holder panics").clone();
    let exit = tell(&args, &ended, &status);
    // Unmapping takes 50 ms a GiB; who waits for the word need not wait for that.
    drop(ram);
    Ok(exit)
}

/// What this end has on disk about an earlier migration.
fn recall(session: Session) -> TargetState {
    Record::of_session(session, End::Target).map_or(TargetState::Unknown, |record| record.state)
}

fn tell(args: &Receive, ended: &target::Ended, status: &Status) -> Exit {
    let (exit, owner, text) = match &ended.outcome {
        TargetOutcome::Running => (Exit::Done, "target", "the guest is here now".to_owned()),
        TargetOutcome::Dropped(reason) if reason == "ended by the operator" => {
            (Exit::Cancelled, "source", format!("{reason}; the guest is the source's"))
        }
        TargetOutcome::Dropped(reason) => {
            (Exit::Failed, "source", format!("{reason}; the guest is the source's"))
        }
        TargetOutcome::InDoubt(reason) => (
            Exit::Person,
            "in-doubt",
            format!(
                "{reason}\n    next: whimbrel resolve --qmp {} says whether it runs here; if it never ran, end this \
                 QEMU by hand, then at the source: whimbrel resolve --qmp SOCK --start",
                args.qmp.display()
            ),
        ),
    };
    eprintln!("whimbrel: {text}");
    if args.json {
        let line = json!({
            "status": if exit == Exit::Done { "completed" } else { "failed" },
            "owner": owner,
            "reason": text,
            "ram": { "transferred": status.ram.transferred, "normal": status.ram.normal, "duplicate": status.ram.duplicate },
            "whimbrel": { "cleared-pages": ended.cleared_pages, "threads": status.whimbrel.threads },
        });
        println!("{line}");
    }
    exit
}
