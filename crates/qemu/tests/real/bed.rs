//! What the tests stand on: a QEMU with a firmware that ticks, and a whimbrel that can be killed.

use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;
use ram::{BlockId, Region};
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use whimbrel_qemu::Vm;

/// A QEMU of the test's own. It ends with the value.
pub struct Qemu {
    child: Child,
    dir: TempDir,
}

/// Starts a QEMU with these options, or returns from the test saying that there is none.
macro_rules! qemu_or_skip {
    ($($option:expr),* $(,)?) => {
        match $crate::bed::Qemu::start(&[$($option.as_ref()),*]) {
            Some(qemu) => qemu,
            None => {
                println!("SKIPPED {}: no QEMU; set WHIMBREL_QEMU to one", module_path!());
                return;
            }
        }
    };
}
pub(crate) use qemu_or_skip;

impl Qemu {
    /// None if there is no QEMU on this machine.
    pub fn start(options: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new(program());
        command.args(["-nodefaults", "-display", "none", "-qmp"]);
        command.arg(format!("unix:{},server=on,wait=off", dir.path().join("qmp").display()));
        command.args(options).stdin(Stdio::null()).stdout(Stdio::null());
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => panic!("{}: {error}", program()),
        };
        let mut qemu = Self { child, dir };
        // It greets when all its objects are made.
        wait_for("QEMU to start", || {
            assert_eq!(qemu.child.try_wait().unwrap(), None, "QEMU ended at once");
            Vm::connect(&qemu.qmp()).ok()
        });
        Some(qemu)
    }

    pub fn qmp(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    /// A directory that lives as long as this QEMU.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn connect(&self) -> Vm {
        Vm::connect(&self.qmp()).unwrap()
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// How many descriptors of this kind the process has, by the link in `/proc/PID/fd`.
    pub fn fd_count(&self, kind: &str) -> usize {
        let links = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let link = |entry: std::fs::DirEntry| std::fs::read_link(entry.path()).unwrap_or_default();
        links.flatten().map(link).filter(|link| link.as_os_str() == kind).count()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program() -> String {
    std::env::var("WHIMBREL_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into())
}

/// The firmware's count of timer interrupts, 18 a second: it moves while the guest runs and at no other time.
pub fn ticks(pid: i32, regions: &[Region]) -> u32 {
    let mut bytes = [0; 4];
    let at = regions.iter().find(|region| region.block == BlockId(0)).unwrap().host + 0x46c;
    read(pid, at, &mut bytes);
    u32::from_le_bytes(bytes)
}

pub fn read(pid: i32, at: u64, into: &mut [u8]) {
    let remote = [RemoteIoVec { base: at as usize, len: into.len() }];
    let bytes = into.len();
    let count = process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(into)], &remote).unwrap();
    assert_eq!(count, bytes);
}

pub fn write(pid: i32, at: u64, from: &[u8]) {
    let remote = [RemoteIoVec { base: at as usize, len: from.len() }];
    let count = process_vm_writev(Pid::from_raw(pid), &[IoSlice::new(from)], &remote).unwrap();
    assert_eq!(count, from.len());
}

/// Waits until the firmware ticks, which shows that the guest runs.
pub fn wait_for_ticks(pid: i32, regions: &[Region]) {
    let first = ticks(pid, regions);
    wait_for("the guest's clock to tick", || (ticks(pid, regions) != first).then_some(()));
}

/// Asks until there is an answer. Fails after 20 s.
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A stand-in for whimbrel, to be killed at will.
pub struct Puppet {
    child: Child,
    steps: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Puppet {
    /// Starts one. If `fault` is not 0, its guard kills it at that point.
    pub fn start(qmp: &Path, fault: u32) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_puppet"));
        command.arg(qmp).env("WHIMBREL_FAULT", fault.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (steps, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, steps, answers }
    }

    /// Its guard.
    pub fn guard(&self) -> Guard {
        let own = format!("PPid:\t{}\n", self.child.id());
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let status = |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        Guard { pid: pids.find(|pid| status(pid).contains(&own)).expect("a guard was started") }
    }

    /// Does a step and returns what it found, or nothing if it was killed meanwhile. Fails if the step fails.
    pub fn step(&mut self, step: &str) -> Option<String> {
        self.begin(step);
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        if answer.is_empty() {
            return None;
        }
        let found = answer.trim().strip_prefix("ok");
        Some(found.unwrap_or_else(|| panic!("{step}: {answer}")).trim().to_owned())
    }

    /// Does a step that must fail, and returns why it did.
    pub fn refused(&mut self, step: &str) -> String {
        self.begin(step);
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        answer.trim().strip_prefix("failed ").unwrap_or_else(|| panic!("{step}: {answer}")).to_owned()
    }

    /// Begins a step without waiting for its end.
    pub fn begin(&mut self, step: &str) {
        writeln!(self.steps, "{step}").unwrap();
    }

    /// Does all of these; none may fail or be cut short.
    pub fn steps(&mut self, steps: &[&str]) {
        for step in steps {
            self.step(step).unwrap_or_else(|| panic!("killed at {step}"));
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn wait(&mut self) {
        self.child.wait().unwrap();
    }
}

/// A guard process, which is a grandchild of ours.
pub struct Guard {
    pid: i32,
}

impl Guard {
    pub fn has_ended(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        // Its number may be another's by now, and whoever inherited it may be slow to bury it.
        !status.starts_with("Name:\twhimbrel-guard\n") || status.contains("State:\tZ")
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
