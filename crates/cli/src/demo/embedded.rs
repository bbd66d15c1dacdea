//! The demo without a VM: the guest of our own, moved between two ends in this process, over real sockets.

use super::{CHECKING, GuestWord, Interrupt, LAP_SECONDS, PATIENCE, Shown, working_bytes};
use crate::args::Demo;
use crate::progress::Display;
use crate::report::{self, Summary};
use crate::source_vm::SourceFacts;
use crate::{Stop, send, signals};
use channel::{Address, Listener};
use engine::{Outcome, Owner};
use guest::{Guest, Shape};
use migrate::{Note, Status, source, target};
use scan::Kernel;
use std::path::Path;

/// Boots a guest, moves it, and lets it check every page at the other end.
pub fn show(args: &Demo, interrupt: &Interrupt) -> Result<Shown, Stop> {
    let shape = shape(args.size);
    let here = Guest::boot(shape).map_err(Stop::qemu)?;
    if !wait_for_laps(&here, 1, interrupt)? {
        return Err(Stop::failed("the embedded guest does not run"));
    }
    eprintln!("demo: source: the guest is up, {} threads check and write its memory", shape.vcpus);
    let there = Guest::await_incoming(shape).map_err(Stop::qemu)?;
    let (outcome, status, address) = migrate(args, &here, &there)?;
    if outcome.owner != Owner::Target {
        interrupt.check()?;
        let reason = outcome.failure.as_ref().map_or("no reason was given", |failure| failure.reason());
        return Err(Stop::failed(format!("the migration failed: {reason}")));
    }
    eprintln!("{CHECKING}");
    let before = there.health();
    let checked = wait_for_laps(&there, 2, interrupt)?;
    let now = there.health();
    let word = GuestWord { visits: now.visits, visits_here: now.visits - before.visits, lost: now.lost };
    let guest = if checked { Ok(word) } else { Err("it does not come round at the target".into()) };
    Ok(Shown { guest, ..shown(&outcome, status, &address) })
}

fn shape(ram_bytes: u64) -> Shape {
    let working_bytes = working_bytes(ram_bytes);
    let vcpus = 2;
    let visits_per_second = working_bytes / ram::PAGE as u64 / LAP_SECONDS / u64::from(vcpus);
    Shape { ram_bytes, vcpus, working_bytes, visits_per_second: visits_per_second as u32 }
}

fn migrate(args: &Demo, here: &Guest, there: &Guest) -> Result<(Outcome, Status, Address), Stop> {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().expect("an address")).map_err(Stop::qemu)?;
    let address = listener.address().clone();
    let receiving = there.target_setup();
    let end_target = receiving.inbox.clone();
    let setup = here.source_setup(address.clone(), send::new_session()?);
    let setup = source::Setup { channels: args.channels, bandwidth: args.bandwidth, ..setup };
    let status = setup.status.clone();
    signals::cancel_on_signals(&setup.inbox).map_err(|error| Stop::failed(error.to_string()))?;
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| target::run(&listener, receiving));
        let display = Display::start(args.output.progress, &status);
        let (outcome, _) = source::run(setup);
        display.end();
        if outcome.owner != Owner::Target {
            end_target.put(Note::Cancel); // It may still listen.
        }
        outcome
    });
    let status = status.lock().expect("no holder panics").clone();
    Ok((outcome, status, address))
}

fn shown(outcome: &Outcome, mut status: Status, address: &Address) -> Shown {
    let verdict = report::verdict(outcome, address, Path::new("SOCK"));
    status.status = verdict.status.into();
    let mut facts = SourceFacts::default();
    facts.mapped_bytes = status.ram.total;
    let kernel = Kernel::best().name;
    let summary = Summary { status: &status, facts: &facts, verdict: &verdict, verified: false, kernel };
    Shown {
        table: summary.table(),
        migration: serde_json::from_str(&summary.json()).expect("what was just written reads back"),
        vmm: "embedded",
        accel: "threads",
        guest: Err("not heard".into()),
    }
}

/// Waits until every page was checked this many times more. False if that does not come.
fn wait_for_laps(guest: &Guest, laps: u64, interrupt: &Interrupt) -> Result<bool, Stop> {
    let enough = guest.health().laps + laps;
    let come = interrupt.wait(PATIENCE, || (guest.health().laps >= enough).then_some(()))?;
    Ok(come.is_some())
}
