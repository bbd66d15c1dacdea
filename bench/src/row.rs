//! Medians of one case, as a line of the table and as JSON.

use crate::case::{Case, Memory};
use crate::sample::{Cost, Mover, Sample};
use serde_json::{Value, json};
use std::time::Duration;

/// A line of the table.
pub struct Row {
    /// What RAM held.
    pub case: Case,
    /// Where it lay.
    pub memory: Memory,
    /// QEMU's medians.
    pub qemu: Medians,
    /// Whimbrel's medians.
    pub whimbrel: Medians,
    ram_gib: f64,
}

/// Medians over the runs of one mover. Times in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Medians {
    /// From the command until the target may run.
    pub wall_ms: f64,
    /// How far the runs lay apart: the longest over the shortest.
    pub spread: f64,
    /// The mover's own `total-time`.
    pub total_ms: f64,
    /// CPU time.
    pub cpu_ms: f64,
    /// From stop to start.
    pub downtime_ms: Option<f64>,
    /// The mover's own `downtime`.
    pub downtime_said_ms: f64,
}

impl Row {
    /// The row of these samples, all of one case and memory.
    pub fn new(case: Case, memory: Memory, ram_gib: f64, samples: &[Sample]) -> Self {
        let of = |mover| {
            let costs = samples.iter().filter(|sample| sample.mover == mover).map(|sample| sample.cost);
            Medians::new(&costs.collect::<Vec<_>>())
        };
        Self { case, memory, qemu: of(Mover::Qemu), whimbrel: of(Mover::Whimbrel), ram_gib }
    }

    /// QEMU's time over ours.
    pub fn ratio(&self) -> f64 {
        self.qemu.wall_ms / self.whimbrel.wall_ms
    }

    /// QEMU's CPU time over ours.
    pub fn cpu_ratio(&self) -> f64 {
        self.qemu.cpu_ms / self.whimbrel.cpu_ms
    }

    /// For people.
    pub fn line(&self) -> String {
        let (qemu, ours) = (&self.qemu, &self.whimbrel);
        let downtimes = match (qemu.downtime_ms, ours.downtime_ms) {
            (Some(qemu), Some(ours)) => format!("{qemu:>10.1} {ours:>9.1}"),
            _ => format!("{:>10} {:>9}", "-", "-"),
        };
        format!(
            "{:<10}{:<10}{:>9.1} {:>9.1} {:>6.2}   {:>8.3} {:>9.3} {:>6.2}  {}   {:>5.2} {:>5.2}",
            self.case.name(),
            self.memory.name(),
            qemu.wall_ms,
            ours.wall_ms,
            self.ratio(),
            self.cpu_per_gib(qemu),
            self.cpu_per_gib(ours),
            self.cpu_ratio(),
            downtimes,
            qemu.spread,
            ours.spread,
        )
    }

    fn cpu_per_gib(&self, medians: &Medians) -> f64 {
        medians.cpu_ms / 1000.0 / self.ram_gib
    }

    fn json(&self) -> Value {
        let (qemu, ours) = (&self.qemu, &self.whimbrel);
        let mut row = json!({
            "case": self.case.name(),
            "backend": self.memory.name(),
            "qemu_ms": rounded(qemu.wall_ms),
            "whimbrel_ms": rounded(ours.wall_ms),
            "ratio": rounded(self.ratio()),
            "cpu_ratio": rounded(self.cpu_ratio()),
            "qemu_cpu_s_per_gib": rounded(self.cpu_per_gib(qemu)),
            "whimbrel_cpu_s_per_gib": rounded(self.cpu_per_gib(ours)),
            "qemu_total_time_ms": qemu.total_ms,
            "whimbrel_total_time_ms": ours.total_ms,
            "qemu_spread": rounded(qemu.spread),
            "whimbrel_spread": rounded(ours.spread),
        });
        if let (Some(of_qemu), Some(of_ours)) = (qemu.downtime_ms, ours.downtime_ms) {
            row["qemu_downtime_ms"] = json!(rounded(of_qemu));
            row["whimbrel_downtime_ms"] = json!(rounded(of_ours));
            row["qemu_said_downtime_ms"] = json!(qemu.downtime_said_ms);
            row["whimbrel_said_downtime_ms"] = json!(ours.downtime_said_ms);
        }
        row
    }
}

impl Medians {
    fn new(costs: &[Cost]) -> Self {
        let of = |value: fn(&Cost) -> f64| median(costs.iter().map(value).collect());
        let walls = || costs.iter().map(|cost| ms(cost.wall));
        let downtimes: Vec<f64> = costs.iter().filter_map(|cost| cost.downtime).map(ms).collect();
        Self {
            wall_ms: of(|cost| ms(cost.wall)),
            spread: walls().fold(0.0, f64::max) / walls().fold(f64::INFINITY, f64::min),
            total_ms: of(|cost| cost.total_ms as f64),
            cpu_ms: of(|cost| ms(cost.cpu)),
            downtime_ms: (!downtimes.is_empty()).then(|| median(downtimes)),
            downtime_said_ms: of(|cost| cost.downtime_said_ms as f64),
        }
    }
}

/// All rows, for machines.
pub fn json(machine: &str, rows: &[Row]) -> Value {
    json!({ "bench": "qemu", "machine": machine, "rows": rows.iter().map(Row::json).collect::<Vec<_>>() })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Stands over the lines.
pub const HEAD: &str = "\
                         time, ms                   CPU, s/GiB              downtime, ms        spread
case      memory         qemu  whimbrel  ratio       qemu  whimbrel  ratio        qemu  whimbrel    qemu  ours";

/// Stands under the lines.
pub const LEGEND: &str = "\
medians; ratio: QEMU's over whimbrel's, above 1 whimbrel is faster; spread: the longest run over the shortest
time: from the command until the target may run, seen from outside; CPU: of both QEMUs without their guests, and
for whimbrel of all its processes as well; downtime: from STOP at the source to RESUME at the target";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle_or_between_the_two_there() {
        assert_eq!(median(vec![9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 9.0]), 3.0);
    }
}
