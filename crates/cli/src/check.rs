//! `whimbrel check`, and the same tests before a migration begins.

use crate::args::Check;
use crate::{Exit, Stop};
use qemu::Vm;
use qemu::check::{Finding, Verdict};

/// Runs the command: a line for each test, and the exit code says whether the VM can be moved.
pub fn run(args: &Check) -> Result<Exit, Stop> {
    let mut vm = Vm::connect(&args.qmp).map_err(Stop::qemu)?;
    let findings = if args.target { qemu::check::target(&mut vm) } else { qemu::check::source(&mut vm) };
    for finding in &findings {
        match args.json {
            true => println!("{}", serde_json::to_string(finding).expect("a finding is plain data")),
            false => println!("{}", line(finding)),
        }
    }
    let failed = findings.iter().any(|finding| finding.verdict == Verdict::Fail);
    Ok(if failed { Exit::Refused } else { Exit::Done })
}

/// Refuses a VM that can't be moved, with every reason; warns of what will cost something.
pub fn require_movable(vm: &mut Vm) -> Result<(), Stop> {
    require(&qemu::check::source(vm), "the VM can't be moved as it is; it runs on untouched")
}

/// Refuses a QEMU that can't take a VM in.
pub fn require_waiting(vm: &mut Vm) -> Result<(), Stop> {
    require(&qemu::check::target(vm), "this QEMU can't take a VM in")
}

fn require(findings: &[Finding], refusal: &str) -> Result<(), Stop> {
    let of = |wanted: Verdict| findings.iter().filter(move |finding| finding.verdict == wanted).map(line);
    let failures: Vec<String> = of(Verdict::Fail).collect();
    if failures.is_empty() {
        of(Verdict::Warn).for_each(|line| eprintln!("{line}"));
        return Ok(());
    }
    Err(Stop { exit: Exit::Refused, text: format!("{refusal}\n{}", failures.join("\n")), next: None })
}

fn line(finding: &Finding) -> String {
    let verdict = match finding.verdict {
        Verdict::Ok => "ok  ",
        Verdict::Warn => "warn",
        Verdict::Fail => "FAIL",
    };
    let fix = finding.fix.as_ref().map(|fix| format!("\n{:<20}fix: {fix}", "")).unwrap_or_default();
    format!("{verdict}  {:<14}{}{fix}", finding.test, finding.text)
}
