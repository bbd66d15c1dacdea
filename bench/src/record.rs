//! Keeps every sample under `bench/record/<machine>/<date>.csv`, with a description of the machine beside it.

use crate::machine;
use crate::sample::Sample;
use crate::settings::Settings;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes the record; gives where it is.
pub fn write(machine: &str, settings: &Settings, samples: &[Sample]) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("record").join(machine);
    fs::create_dir_all(&directory).expect("the source tree is writable");
    let path = directory.join(format!("{}.csv", today()));
    fs::write(&path, csv(settings, samples)).expect("a record is written");
    fs::write(path.with_extension("txt"), machine::description()).expect("a description is written");
    path
}

fn csv(settings: &Settings, samples: &[Sample]) -> String {
    let mut text = String::from(COLUMNS);
    for sample in samples {
        let cost = &sample.cost;
        let downtime = cost.downtime.map(|time| time.as_micros().to_string()).unwrap_or_default();
        let _ = writeln!(
            text,
            "{},{},{},{},{},{},{},{},{},{},{},{}",
            sample.case.name(),
            sample.memory.name(),
            settings.ram_mib,
            settings.channels,
            settings.accel.name(),
            sample.run,
            sample.mover.name(),
            cost.wall.as_micros(),
            cost.total_ms,
            cost.cpu.as_micros(),
            downtime,
            cost.downtime_said_ms,
        );
    }
    text
}

fn today() -> String {
    let output = Command::new("date").arg("+%F").output().expect("date is everywhere");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

const COLUMNS: &str = "case,memory,ram_mib,channels,accel,run,mover,wall_us,total_time_ms,cpu_us,downtime_us,\
                       said_downtime_ms\n";
