//! `whimbrel migrate`: moves the VM of a running QEMU.

use crate::args::Migrate;
use crate::faults::{self, Rule};
use crate::job::Job;
use crate::progress::Display;
use crate::report::{self, Summary};
use crate::runtime::Lock;
use crate::source_vm::{QemuSource, SourceFacts, record};
use crate::{Exit, Stop, check, signals};
use channel::Address;
use engine::{Limits, Outcome};
use migrate::{Inbox, Offer, Status, source};
use qemu::{Guard, Vm};
use scan::Kernel;
use std::sync::{Arc, Mutex};
use wire::{Format, Session};

/// Runs the command.
pub fn run(args: Migrate) -> Result<Exit, Stop> {
    require_local(&args.address, args.insecure)?;
    let format = u32::try_from(args.tuning.packet_size).map_err(|_| oversized(args.tuning.packet_size))?;
    let format = Format::new(format).map_err(|error| Stop::usage(format!("--packet-size: {error}")))?;
    let _lock = Lock::take(&args.qmp)?;
    let mut vm = Vm::connect(&args.qmp).map_err(Stop::qemu)?;
    check::require_movable(&mut vm)?;
    let direct_io = vm.direct_io_nodes().map_err(Stop::qemu)?;
    let machine = vm.machine().map_err(Stop::qemu)?;
    let run_state = vm.run_state().map_err(Stop::qemu)?;
    let accelerator = vm.accelerator().map_err(Stop::qemu)?;
    let (layout, regions) = qemu::blocks(&mut vm).map_err(Stop::qemu)?;
    let offer = offer(&vm, &machine, layout.clone());
    let session = new_session()?;
    let facts = Arc::new(Mutex::new(SourceFacts::default()));
    let source_vm = QemuSource {
        guard: Guard::start(&mut vm).map_err(Stop::qemu)?,
        record: record(session, vm.pid(), &args.address, run_state.running),
        layout,
        regions,
        accelerator,
        vcpus: machine.cpu_count as u32,
        running: run_state.running,
        keep: args.keep_source,
        facts: facts.clone(),
        vm,
    };
    let (inbox, status) = (Arc::new(Inbox::default()), Arc::new(Mutex::new(Status::default())));
    status.lock().expect("no holder panics").ram.total = offer.layout.pages() * ram::PAGE as u64;
    let job = Job::serve(&args.qmp, &inbox, &status)?;
    signals::cancel_on_signals(&inbox).map_err(|error| Stop::failed(error.to_string()))?;
    let display = Display::start(args.output.progress, &status);
    let tuning = &args.tuning;
    let (outcome, source_vm) = source::run(source::Setup {
        vm: Box::new(source_vm),
        offer,
        address: args.address.clone(),
        session,
        running: run_state.running,
        channels: tuning.channels,
        format,
        detection: tuning.zero_page_detection,
        normal_page_ratio: tuning.normal_page_ratio,
        bandwidth: tuning.bandwidth,
        verify: tuning.verify,
        limits: Limits {
            downtime_max: tuning.max_downtime,
            timeout: tuning.timeout,
            timeout_action: tuning.timeout_action,
            direct_io: !direct_io.is_empty() && !faults::is_off(Rule::DirectIo),
        },
        kernel: Kernel::best(),
        inbox,
        status: status.clone(),
    });
    display.end();
    drop(job);
    drop(source_vm);
    let facts = facts.lock().expect("no holder panics").clone();
    let mut status = status.lock().expect("no holder panics").clone();
    Ok(tell(&args, outcome, &mut status, &facts))
}

fn tell(args: &Migrate, outcome: Outcome, status: &mut Status, facts: &SourceFacts) -> Exit {
    let verdict = report::verdict(&outcome, &args.address, &args.qmp);
    status.status = verdict.status.into();
    status.error_desc = verdict.reason.clone().or(status.error_desc.take());
    let kernel = Kernel::best().name;
    let summary = Summary { status, facts, verdict: &verdict, verified: args.tuning.verify, kernel };
    if verdict.exit == Exit::Done {
        println!("{}", summary.table());
    } else {
        eprintln!("{}", verdict.text());
    }
    if args.output.json {
        println!("{}", summary.json());
    }
    verdict.exit
}

/// Until connections are encrypted, RAM leaves this host only if the operator says so.
pub fn require_local(address: &Address, insecure: bool) -> Result<(), Stop> {
    match (address.is_local(), insecure) {
        (true, _) => Ok(()),
        (false, true) => {
            eprintln!(
                "whimbrel: warning: {address} is beyond this host and --insecure was given: whoever is on the way \
                 can read and change the guest's memory, and take the guest"
            );
            Ok(())
        }
        (false, false) => {
            Err(Stop::usage(format!("{address} is beyond this host, and connections are not encrypted yet"))
                .next("use a tunnel to tcp:127.0.0.1, or add --insecure if the network is yours alone"))
        }
    }
}

/// What both ends compare.
pub fn offer(vm: &Vm, machine: &qemu::Machine, layout: ram::Layout) -> Offer {
    Offer {
        qemu: vm.version().to_string(),
        machine: machine.name.clone(),
        cpu: machine.cpu.clone(),
        vcpus: machine.cpu_count as u32,
        page_bits: machine.page_bits,
        layout,
        uuid: [0; 16],
    }
}

/// Names a migration.
pub fn new_session() -> Result<Session, Stop> {
    use std::io::Read;
    let mut bytes = [0; 16];
    let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    random.map_err(|error| Stop::failed(format!("cannot read /dev/urandom: {error}")))?;
    Ok(Session(bytes))
}

fn oversized(bytes: u64) -> Stop {
    Stop::usage(format!("--packet-size: {bytes} bytes is more than the 8 MiB that a packet may have"))
}
