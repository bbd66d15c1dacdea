//! `whimbrel demo`: a live migration to watch, with nothing set up. Two QEMUs with a guest that checks its own memory,
//! or the guest of our own where there is no QEMU.

mod child;
mod embedded;
mod pair;
mod serial;

use crate::args::Demo;
use crate::{Exit, Stop, report};
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Runs the command.
pub fn run(args: &Demo) -> Result<Exit, Stop> {
    let shown = show(args).inspect_err(|stop| {
        if args.output.json {
            println!("{}", json!({ "status": "failed", "error-desc": stop.text, "guest_ok": false }));
        }
    })?;
    println!("{}", shown.table());
    if args.output.json {
        println!("{}", shown.json());
    }
    Ok(if shown.is_good() { Exit::Done } else { Exit::Failed })
}

fn show(args: &Demo) -> Result<Shown, Stop> {
    if args.size < SIZE_MIN {
        return Err(Stop::usage(format!(
            "--size: {} is too little to see anything",
            report::bytes(args.size)
        ))
        .next("whimbrel demo --size 64MiB, or more"));
    }
    let interrupt = Interrupt::new()?;
    match pair::show(args, &interrupt) {
        Ok(shown) => Ok(shown),
        Err(pair::Missed::Stop(stop)) => Err(stop),
        Err(pair::Missed::NoQemu(reason)) => {
            eprintln!("demo: not with QEMU: {reason}");
            eprintln!("demo: moving the embedded guest instead, in one process, without a VM");
            embedded::show(args, &interrupt)
        }
    }
}

/// What there was to see.
struct Shown {
    /// The summary of the migration.
    table: String,
    /// The same for machines.
    migration: Value,
    /// `qemu` or `embedded`.
    vmm: &'static str,
    accel: &'static str,
    /// What the guest said at the target, or why it did not.
    guest: Result<GuestWord, String>,
}

/// The guest's own word, at the target.
struct GuestWord {
    /// Pages checked since it was booted.
    visits: u64,
    /// Of these, at the target.
    visits_here: u64,
    /// Pages that were not as it left them.
    lost: u64,
}

impl Shown {
    fn is_good(&self) -> bool {
        self.guest.as_ref().is_ok_and(|word| word.lost == 0)
    }

    fn table(&self) -> String {
        let word = match &self.guest {
            Ok(GuestWord { visits_here, lost: 0, .. }) => {
                format!("ok: {visits_here} pages checked since, each at least once, 0 lost")
            }
            Ok(GuestWord { lost, .. }) => format!("NOT OK: {lost} pages lost"),
            Err(reason) => format!("NOT OK: {reason}"),
        };
        format!("{}\n{}", self.table, report::row("guest", &word))
    }

    fn json(&self) -> String {
        let mut all = self.migration.clone();
        all["guest_ok"] = json!(self.is_good());
        let word = self.guest.as_ref().ok();
        all["guest"] = json!(word.map(|word| json!({ "visits": word.visits, "lost": word.lost })));
        all["vmm"] = json!(self.vmm);
        all["accel"] = json!(self.accel);
        all.to_string()
    }
}

/// Ctrl-C, a polite kill or a closed terminal: everything that waits ends, and with it all that was started.
struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    fn new() -> Result<Self, Stop> {
        let came = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, came.clone())
                .map_err(|error| Stop::failed(format!("cannot watch for Ctrl-C: {error}")))?;
        }
        Ok(Self(came))
    }

    fn came(&self) -> bool {
        self.0.load(Relaxed)
    }

    fn check(&self) -> Result<(), Stop> {
        match self.came() {
            false => Ok(()),
            true => Err(Stop {
                exit: Exit::Cancelled,
                text: "the demo was ended; all that it started is gone".into(),
                next: None,
            }),
        }
    }

    /// Polls until `found` gives something. None if nothing came in time.
    fn wait<T>(&self, time_max: Duration, mut found: impl FnMut() -> Option<T>) -> Result<Option<T>, Stop> {
        let end = Instant::now() + time_max;
        loop {
            let last = Instant::now() >= end;
            let value = found();
            if value.is_some() || last {
                return Ok(value);
            }
            self.check()?;
            std::thread::sleep(POLL);
        }
    }
}

const CHECKING: &str = "demo: target: the guest runs, and checks every page again";

/// Bytes of the guest's working set: a quarter of its RAM, and no more than a slow machine checks in seconds.
fn working_bytes(ram_bytes: u64) -> u64 {
    (ram_bytes / 4).min(512 << 20)
}

/// The guest checks its whole working set in this time, if the machine lets it, so that the demo can wait for that.
const LAP_SECONDS: u64 = 3;

/// The bare-metal guest and QEMU's firmware take a few.
const SIZE_MIN: u64 = 64 << 20;

/// What takes a second or two on an idle machine may take this long.
const PATIENCE: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(10);
