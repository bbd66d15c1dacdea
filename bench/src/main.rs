//! Moves the same VM by QEMU's own migration and by whimbrel, in turn, and prints both as a table. Asserts that the
//! guest arrived, and nothing about time.
//!
//! Both are timed from outside, from the command until the target may run its guest: QEMU from `migrate` until the
//! target reports that the migration is complete, whimbrel from the start of `whimbrel migrate` until
//! `whimbrel receive` says that the guest is there; a running guest, with either, until the target's QEMU reports
//! that it runs. So whimbrel pays for the start of its processes, and for the confirmation after the guest is free.

mod by_qemu;
mod by_whimbrel;
mod case;
mod cpu;
mod ends;
mod machine;
mod monitor;
mod page;
mod record;
mod row;
mod sample;
mod settings;

use case::{Case, Memory};
use ends::{Source, Target};
use row::Row;
use sample::{Mover, Sample};
use settings::Settings;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(harness::Error::Missing(missing)) => {
            eprintln!("SKIPPED: bench-qemu: {missing}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bench-qemu: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), harness::Error> {
    let settings = Settings::from_environment();
    let mut samples = Vec::new();
    println!("{}", settings.told());
    println!("{}", row::HEAD);
    let mut rows = Vec::new();
    for &case in &settings.cases {
        for &memory in &settings.memories {
            let measured = measure(&settings, case, memory)?;
            let row = Row::new(case, memory, settings.ram_gib(), &measured);
            println!("{}", row.line());
            rows.push(row);
            samples.extend(measured);
        }
    }
    println!("{}", row::LEGEND);
    let machine = machine::slug();
    println!("bars: {}", page::write(&machine, &settings, &rows).display());
    if settings.record {
        println!("record: {}", record::write(&machine, &settings, &samples).display());
    }
    if settings.json {
        println!("{}", row::json(&machine, &rows));
    }
    Ok(())
}

/// The samples of one row. The first move is by whimbrel with digests of all RAM compared, and is not counted.
fn measure(settings: &Settings, case: Case, memory: Memory) -> Result<Vec<Sample>, harness::Error> {
    let mut source = Source::boot(settings, case, memory)?;
    let mut samples = Vec::new();
    let rounds = (0..settings.runs).flat_map(|run| Mover::BOTH.map(|mover| (run + 1, mover)));
    for (run, mover) in std::iter::once((0, Mover::Whimbrel)).chain(rounds) {
        source.make_ready(settings)?;
        let mut target = Target::boot(settings, case, memory)?;
        let cost = match mover {
            Mover::Qemu => by_qemu::migrate(settings, &mut source, &mut target),
            Mover::Whimbrel if run == 0 => by_whimbrel::migrate_verified(settings, &mut source, &mut target),
            Mover::Whimbrel => by_whimbrel::migrate(settings, &mut source, &mut target),
        };
        target.expect_guest(&source);
        if run > 0 {
            samples.push(Sample { case, memory, run, mover, cost });
        }
    }
    Ok(samples)
}
