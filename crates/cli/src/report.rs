//! What people and machines are told: progress, the summary at the end, who owns the VM and what to type next.

use crate::Exit;
use crate::source_vm::SourceFacts;
use channel::Address;
use engine::{Failure, Outcome, Owner};
use migrate::Status;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

/// How a migration ended, in words.
pub struct Verdict {
    /// The exit code.
    pub exit: Exit,
    /// `query-migrate`'s word.
    pub status: &'static str,
    /// Who owns the VM, for machines.
    pub owner: Owner,
    /// What failed.
    pub reason: Option<String>,
    /// Who owns the VM and where it runs.
    ownership: String,
    /// The next command to type.
    next: Option<String>,
}

impl Verdict {
    /// For people.
    pub fn text(&self) -> String {
        let mut text = match &self.reason {
            Some(reason) => format!("whimbrel: {reason}\n    {}", self.ownership),
            None => format!("whimbrel: {}", self.ownership),
        };
        if let Some(next) = &self.next {
            let _ = write!(text, "\n    next: {next}");
        }
        text
    }
}

/// The verdict over an outcome.
pub fn verdict(outcome: &Outcome, target: &Address, qmp: &Path) -> Verdict {
    let cancelled = outcome.cancelled.then(|| "ended by the operator".to_owned());
    let reason = cancelled.or_else(|| outcome.failure.as_ref().map(|failure| failure.reason().to_owned()));
    let qmp = qmp.display();
    let resolve = format!("whimbrel resolve --qmp {qmp}");
    let (exit, status, ownership, next) = match (outcome.owner, outcome.cancelled, &outcome.failure) {
        (Owner::Target, ..) => (Exit::Done, "completed", format!("the VM runs at {target}"), None),
        (Owner::InDoubt, ..) => (
            Exit::Person,
            "failed",
            "handed over, unconfirmed: the target may run the VM; it is kept paused here".into(),
            Some(resolve),
        ),
        (Owner::SourceStopped, ..) => (
            Exit::Person,
            "failed",
            "the VM is the source's but stands still here".into(),
            Some(format!("{resolve} --start")),
        ),
        (Owner::Source, true, _) => (Exit::Cancelled, "cancelled", RUNS_HERE.into(), None),
        (Owner::Source, _, Some(Failure::Peer(_))) => (
            Exit::Peer,
            "failed",
            RUNS_HERE.into(),
            Some(format!("look at the target's whimbrel; then whimbrel migrate {target} --qmp {qmp}")),
        ),
        (Owner::Source, _, Some(Failure::NotConverging(_))) => (
            Exit::NotConverging,
            "failed",
            RUNS_HERE.into(),
            Some("more --channels, a longer --max-downtime, or --timeout-action switchover".into()),
        ),
        (Owner::Source, ..) => {
            (Exit::Failed, "failed", RUNS_HERE.into(), Some(format!("whimbrel check --qmp {qmp}")))
        }
    };
    Verdict { exit, status, owner: outcome.owner, reason, ownership, next }
}

const RUNS_HERE: &str = "the VM runs on here at the source, as before";

/// What a running migration is doing, in at most 10 columns.
pub fn pass(status: &Status) -> String {
    match status.status.as_str() {
        "active" => format!("pass {}", status.whimbrel.rounds + 1),
        "device" | "completed" => "switchover".into(),
        other => other.into(),
    }
}

/// One line of numbers about a running migration. It does not jump as they change, and stays below 80 columns.
pub fn numbers(status: &Status) -> String {
    let ram = &status.ram;
    let pages = (ram.normal + ram.duplicate).max(1);
    let dirty = match ram.dirty_sync_count {
        0 => "unknown".into(), // Until the first pass ends.
        _ => format!("{}/s", bytes(ram.dirty_pages_rate * ram.page_size)),
    };
    format!(
        "sent {:>8}  left {:>8}  {:>10}  dirty {:>10}  zero {:>2}%",
        bytes(ram.transferred),
        bytes(ram.remaining),
        bits(ram.mbps),
        dirty,
        100 * ram.duplicate / pages,
    )
}

/// One line about a job, as its socket answers.
pub fn status_line(job: &Value) -> String {
    let (migration, ram) = (&job["migration"], &job["migration"]["ram"]);
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    format!(
        "{}  {}  pass {}  sent {}  left {}  {}  {:.1} s",
        job["qmp"].as_str().unwrap_or("?"),
        migration["status"].as_str().unwrap_or("?"),
        number(&migration["whimbrel"]["rounds"]) + 1,
        bytes(number(&ram["transferred"])),
        bytes(number(&ram["remaining"])),
        bits(ram["mbps"].as_f64().unwrap_or_default()),
        number(&migration["total-time"]) as f64 / 1000.0,
    )
}

/// The end of a migration.
pub struct Summary<'a> {
    pub status: &'a Status,
    pub facts: &'a SourceFacts,
    pub verdict: &'a Verdict,
    pub verified: bool,
    /// What looked for zero pages.
    pub kernel: &'a str,
}

impl Summary<'_> {
    /// A few lines for people.
    pub fn table(&self) -> String {
        let (status, ram, ours) = (self.status, &self.status.ram, &self.status.whimbrel);
        let cpu: u64 = ours.threads.iter().map(|thread| thread.cpu_ms).sum();
        let mut rows = vec![
            ("total time", seconds(status.total_time)),
            (
                "downtime",
                format!(
                    "{} ms (predicted {} ms)",
                    status.downtime.unwrap_or_default(),
                    ours.predicted_downtime.unwrap_or_default()
                ),
            ),
            ("rounds", ours.rounds.to_string()),
            ("RAM", format!("{}, {}", bytes(ram.total), self.reach())),
            ("transferred", bytes(ram.transferred)),
            ("throughput", bits(8e-3 * ram.transferred as f64 / status.total_time.max(1) as f64)),
            ("data pages", ram.normal.to_string()),
            ("zero pages", format!("{} (found by {} on the CPU)", ram.duplicate, self.kernel)),
            ("holes skipped", self.holes()),
            ("CPU", format!("{} in {} threads", seconds(cpu), ours.threads.len())),
        ];
        if !self.facts.attach_stop.is_zero() {
            let stop = rounded(self.facts.attach_stop);
            rows.push(("attach", format!("stopped one thread of QEMU for {stop:?}")));
        }
        if self.facts.barriers > 0 {
            let (count, time) = (self.facts.barriers, rounded(self.facts.barrier_time));
            rows.push(("direct I/O", format!("{count} short stops to drain it, {time:?} together")));
        }
        if self.verified {
            rows.push(("verified", "the digests of all RAM are equal at both ends".into()));
        }
        let head = format!("completed: {}", self.verdict.ownership);
        let lines = rows.iter().map(|(name, value)| format!("\n{}", row(name, value)));
        let warning = status.error_desc.iter().map(|text| format!("\n{}", row("warning", text)));
        std::iter::once(head).chain(lines).chain(warning).collect()
    }

    fn reach(&self) -> String {
        match self.facts.mapped_bytes {
            0 => "read by copying".into(),
            all if all >= self.status.ram.total => "read in place".into(),
            some => format!("{} of it read in place, the rest by copying", bytes(some)),
        }
    }

    fn holes(&self) -> String {
        let ours = &self.status.whimbrel;
        match ours.discarded {
            0 => format!("{} pages", ours.holes_skipped),
            discarded => format!("{} pages, {discarded} discarded later", ours.holes_skipped),
        }
    }

    /// One line for machines: `query-migrate`'s names, ours under `whimbrel`.
    pub fn json(&self) -> String {
        let mut all = serde_json::to_value(self.status).expect("a status is plain data");
        all["exit-code"] = json!(self.verdict.exit as u8);
        let ours = &mut all["whimbrel"];
        ours["owner"] = json!(self.verdict.owner);
        ours["verified"] = json!(self.verified && self.verdict.exit == Exit::Done);
        ours["zero-check"] = json!(self.kernel);
        ours["attach-stop-us"] = json!(self.facts.attach_stop.as_micros() as u64);
        ours["barriers"] = json!(self.facts.barriers);
        ours["barrier-time"] = json!(self.facts.barrier_time.as_millis() as u64);
        ours["mapped-bytes"] = json!(self.facts.mapped_bytes);
        let tracker = &self.facts.tracker;
        ours["dirty"] = json!({
            "arm-us": tracker.arm.as_micros() as u64,
            "collect-us": tracker.collect.as_micros() as u64,
            "reconcile-us": tracker.reconcile.as_micros() as u64,
            "scan-calls": tracker.calls,
            "discarded-pages": tracker.discarded_pages,
        });
        all.to_string()
    }
}

/// A row of the summary.
pub fn row(name: &str, value: &str) -> String {
    format!("  {name:<15}{value}")
}

/// 1536 -> `1.5 KiB`; at most 8 columns.
pub fn bytes(count: u64) -> String {
    if count < 1024 {
        return format!("{count} B");
    }
    let (mut value, mut units) = (count as f64 / 1024.0, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].iter());
    let mut unit = units.next();
    while value >= 1023.5 {
        (value, unit) = (value / 1024.0, units.next());
    }
    format!("{value:.*} {}", usize::from(value < 99.95), unit.expect("u64 ends at 16 EiB"))
}

fn bits(mbps: f64) -> String {
    if mbps < 1000.0 { format!("{mbps:.0} Mbit/s") } else { format!("{:.1} Gbit/s", mbps / 1000.0) }
}

fn seconds(milliseconds: u64) -> String {
    format!("{:.2} s", milliseconds as f64 / 1000.0)
}

fn rounded(time: Duration) -> Duration {
    Duration::from_micros(time.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short_at_every_edge() {
        let edge = |power: u32| (bytes((1 << power) - 1), bytes(1 << power));
        assert_eq!(edge(10), ("1023 B".into(), "1.0 KiB".into()));
        assert_eq!(edge(20), ("1.0 MiB".into(), "1.0 MiB".into()));
        assert_eq!(edge(30), ("1.0 GiB".into(), "1.0 GiB".into()));
        assert_eq!((bytes(62_900 << 10), bytes(300 << 20)), ("61.4 MiB".into(), "300 MiB".into()));
        assert!((0..64).all(|power| bytes((1 << power) + (1 << power >> 1)).len() <= 8));
    }

    #[test]
    fn the_numbers_of_a_migration_fit_80_columns() {
        let mut status = Status::default();
        assert!(numbers(&status).len() < 80);
        let ram = &mut status.ram;
        (ram.transferred, ram.remaining, ram.dirty_pages_rate) = (1023 << 20, 1023 << 30, 1023 << 8);
        (ram.mbps, ram.page_size, ram.duplicate, ram.dirty_sync_count) = (999_900.0, 4096, 5, 1);
        assert!(numbers(&status).len() < 80, "{}", numbers(&status));
    }
}
