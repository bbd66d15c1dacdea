//! A move by whimbrel, which starts for it at both ends. The source's QEMU is kept, as QEMU's own migration keeps it.

use crate::cpu;
use crate::ends::{Source, Target, downtime};
use crate::sample::Cost;
use crate::settings::Settings;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

/// Moves the guest.
pub fn migrate(settings: &Settings, source: &mut Source, target: &mut Target) -> Cost {
    run(settings, source, target, &[])
}

/// Moves the guest, and has both ends compare digests of all RAM.
pub fn migrate_verified(settings: &Settings, source: &mut Source, target: &mut Target) -> Cost {
    run(settings, source, target, &["--verify"])
}

fn run(settings: &Settings, source: &mut Source, target: &mut Target, more: &[&str]) -> Cost {
    let cpu_before = cpu::of_ended_children() + source.end.cpu() + target.end.cpu();
    let (mut receiver, address, mut errors) = receive(target);
    std::thread::sleep(AHEAD);
    let start = Instant::now();
    let mut sender = send(settings, source, &address, more);
    let resumed = source.case().runs().then(|| {
        target.wait_resumed();
        start.elapsed()
    });
    let said = wait_line(&mut errors, "the guest is here now");
    let wall = resumed.unwrap_or(start.elapsed());
    let received = receiver.wait().expect("a child of ours");
    assert!(received.success(), "whimbrel receive failed: {said}{}", rest(errors));
    let said = result(&mut sender);
    let cpu = cpu::of_ended_children() + source.end.cpu() + target.end.cpu() - cpu_before;
    Cost {
        wall,
        total_ms: said["total-time"].as_u64().unwrap_or_default(),
        cpu,
        downtime: downtime(source.case(), source, target),
        downtime_said_ms: said["downtime"].as_u64().unwrap_or_default(),
    }
}

/// Starts `whimbrel receive`; gives where it listens.
fn receive(target: &Target) -> (Child, String, BufReader<ChildStderr>) {
    let mut command = whimbrel();
    command.args(["receive", "tcp:127.0.0.1:0", "--qmp"]).arg(target.end.vm.qmp_socket());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("whimbrel starts");
    let mut errors = BufReader::new(child.stderr.take().expect("it was piped"));
    let mut line = String::new();
    errors.read_line(&mut line).expect("whimbrel's errors are text");
    let address = line.trim_end().strip_prefix("listening on ");
    let address = address.unwrap_or_else(|| panic!("whimbrel receive says {line:?}")).to_owned();
    (child, address, errors)
}

fn send(settings: &Settings, source: &Source, address: &str, more: &[&str]) -> Child {
    let mut command = whimbrel();
    command.args(["migrate", address, "--channels", &settings.channels.to_string(), "--qmp"]);
    command
        .arg(source.end.vm.qmp_socket())
        .args(["--keep-source", "--json", "--progress", "none"])
        .args(more);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("whimbrel starts")
}

/// Waits for the sender's end; gives the object on its last line. Its output fits a pipe.
fn result(sender: &mut Child) -> Value {
    let ended = sender.wait().expect("a child of ours");
    let mut text = String::new();
    sender.stdout.take().expect("it was piped").read_to_string(&mut text).expect("whimbrel's output is text");
    let errors = BufReader::new(sender.stderr.take().expect("it was piped"));
    assert!(ended.success(), "whimbrel migrate failed: {}", rest(errors));
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|error| panic!("whimbrel said {line:?}: {error}"))
}

/// Reads until a line with `text` has come, or the end.
fn wait_line(errors: &mut BufReader<ChildStderr>, text: &str) -> String {
    let mut lines = String::new();
    while !lines.contains(text) && errors.read_line(&mut lines).expect("whimbrel's errors are text") > 0 {}
    lines
}

fn rest(mut errors: BufReader<ChildStderr>) -> String {
    let mut text = String::new();
    errors.read_to_string(&mut text).expect("whimbrel's errors are text");
    text
}

/// `WHIMBREL_BIN`, else the program beside this one; gone when this one is.
fn whimbrel() -> Command {
    let beside = || std::env::current_exe().expect("a bench knows its path").with_file_name("whimbrel");
    let program = std::env::var_os("WHIMBREL_BIN").map_or_else(beside, PathBuf::from);
    assert!(program.exists(), "{} is not there: make bench-qemu builds it", program.display());
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program).stdin(Stdio::null());
    command
}

/// How long a target waits before its guest comes: time in which it may look at its memory, as it may in life. What
/// that takes counts as CPU time.
const AHEAD: Duration = Duration::from_secs(1);
