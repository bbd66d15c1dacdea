//! A QEMU process with a guest in it: described by a [`VmSpec`], running as a [`Vm`], gone when dropped.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::backend::Held;
use crate::cgroup::ReadLimit;
use crate::disk::scratch;
use crate::{Accel, Backend, DEADLINE, Disk, Error, Guest, Qmp, QmpError, Transcript, qemu, wait_until};

/// A VM to be.
#[derive(Debug, Clone)]
pub struct VmSpec {
    guest: Guest,
    accel: Accel,
    backend: Backend,
    ram_mib: u64,
    disks: Vec<Disk>,
    arguments: Vec<String>,
}

/// A QEMU process of ours. Killed when dropped, and with the thread that booted it.
pub struct Vm {
    guest: Guest,
    child: Child,
    _limit: Option<ReadLimit>,
    _held: Held,
    directory: TempDir,
}

/// What the guest does at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    Running,
    Paused,
    Incoming,
}

impl VmSpec {
    /// A q35 with the least RAM that suits the guest (64 MiB; 768 for Linux), default memory, under TCG.
    pub fn new(guest: Guest) -> Self {
        let ram_mib = guest.ram_mib();
        VmSpec {
            guest,
            accel: Accel::Tcg,
            backend: Backend::Default,
            ram_mib,
            disks: vec![],
            arguments: vec![],
        }
    }

    /// Who runs the guest's instructions.
    pub fn accel(mut self, accel: Accel) -> Self {
        self.accel = accel;
        self
    }

    /// Where guest RAM lies.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// How much guest RAM there is.
    pub fn ram_mib(mut self, mib: u64) -> Self {
        self.ram_mib = mib;
        self
    }

    /// Adds a disk; the first is /dev/vda.
    pub fn disk(mut self, disk: Disk) -> Self {
        self.disks.push(disk);
        self
    }

    /// Adds a balloon device with free page reporting.
    pub fn balloon(self) -> Self {
        self.arg("-device").arg("virtio-balloon-pci,id=balloon,free-page-reporting=on")
    }

    /// Adds one word to QEMU's command line.
    pub fn arg(mut self, word: &str) -> Self {
        self.arguments.push(word.to_owned());
        self
    }

    /// Starts it, and waits until the monitor answers.
    pub fn boot(&self) -> Result<Vm, Error> {
        Vm::start(self, Start::Running)
    }

    /// Starts it with the guest stopped before its first instruction.
    pub fn boot_paused(&self) -> Result<Vm, Error> {
        Vm::start(self, Start::Paused)
    }

    /// Starts its twin, which waits for a migration: the same machine, RAM of its own, the same disks.
    pub fn await_incoming(&self) -> Result<Vm, Error> {
        Vm::start(self, Start::Incoming)
    }
}

impl Vm {
    fn start(spec: &VmSpec, start: Start) -> Result<Self, Error> {
        qemu::version()?;
        spec.accel.check()?;
        spec.guest.check(spec.accel)?;
        let directory = tempfile::Builder::new()
            .prefix("whimbrel-vm-")
            .tempdir()
            .map_err(Error::io("can't make a directory for a VM"))?;
        let held = spec.backend.hold(spec.ram_mib, &scratch())?;
        let mut command = command(spec, start, &held, directory.path())?;
        let child = command.spawn().map_err(Error::io("can't start setpriv (of util-linux)"))?;
        let mut vm = Vm { guest: spec.guest.clone(), child, _limit: None, _held: held, directory };
        vm.wait_for_monitor(&command)?;
        if start != Start::Incoming
            && let Some(disk) = spec.disks.iter().find(|disk| disk.device_limit().is_some())
        {
            let limit = disk.device_limit().unwrap_or(u64::MAX);
            vm._limit = Some(ReadLimit::put(vm.pid(), disk.path(), limit)?);
        }
        Ok(vm)
    }

    fn wait_for_monitor(&mut self, command: &Command) -> Result<(), Error> {
        let answered = wait_until(DEADLINE, || {
            let answered = Qmp::connect(&self.monitor_socket(), DEADLINE).is_ok();
            (answered || self.exit_status().is_some()).then_some(answered)
        });
        if answered == Some(true) {
            return Ok(());
        }
        Err(Error::Boot { command: format!("{command:?}"), stderr: self.stderr() })
    }

    /// The process that runs the guest.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The QMP socket to give to whimbrel. The harness has one of its own, so neither waits for the other.
    pub fn qmp_socket(&self) -> PathBuf {
        self.directory.path().join("qmp.sock")
    }

    fn monitor_socket(&self) -> PathBuf {
        self.directory.path().join("monitor.sock")
    }

    /// Runs a QMP command. Fails if QEMU refuses it or is gone.
    pub fn try_execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        Qmp::connect(&self.monitor_socket(), DEADLINE)?.execute(command, arguments)
    }

    /// Runs a QMP command that must succeed.
    #[track_caller]
    pub fn execute(&self, command: &str, arguments: Value) -> Value {
        self.try_execute(command, arguments).unwrap_or_else(|error| self.fail(&format!("{command}: {error}")))
    }

    /// Runs a command of the human monitor; gives what it prints.
    #[track_caller]
    pub fn hmp(&self, line: &str) -> String {
        let answer = self.execute("human-monitor-command", json!({ "command-line": line }));
        answer.as_str().unwrap_or_default().to_owned()
    }

    /// QEMU's word for the state of the guest (`running`, `paused`, `inmigrate`, …), or `gone`.
    pub fn state(&self) -> String {
        match self.try_execute("query-status", json!({})) {
            Ok(status) => status["status"].as_str().unwrap_or_default().to_owned(),
            Err(_) => "gone".to_owned(),
        }
    }

    /// Whether the guest executes instructions.
    pub fn is_running(&self) -> bool {
        self.state() == "running"
    }

    /// Stops the guest, as anyone with a monitor may.
    #[track_caller]
    pub fn pause(&self) {
        self.execute("stop", json!({}));
    }

    /// Lets the guest run on.
    #[track_caller]
    pub fn resume(&self) {
        self.execute("cont", json!({}));
    }

    /// How QEMU ended, if it has.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("QEMU is a child of ours")
    }

    /// Ends QEMU as a crash would.
    pub fn kill(&mut self) {
        self.child.kill().expect("a child may always be killed");
        self.child.wait().expect("QEMU is a child of ours");
    }

    /// Sends a signal to QEMU, such as SIGSTOP.
    pub fn signal(&self, signal: Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid() as i32), signal)
            .expect("QEMU is a child of ours and was not waited for");
    }

    /// What the guest has printed so far.
    pub fn transcript(&self) -> Transcript {
        Transcript::read(&self.directory.path().join("serial"))
    }

    /// What QEMU itself has printed so far.
    pub fn stderr(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("stderr")).unwrap_or_default()
    }

    /// Waits for the first line of the guest that contains `text`.
    #[track_caller]
    pub fn wait_line(&self, text: &str) -> String {
        let found = wait_until(DEADLINE, || {
            self.transcript().lines().find(|line| line.contains(text)).map(str::to_owned)
        });
        found.unwrap_or_else(|| self.fail(&format!("the guest did not print {text:?}")))
    }

    /// Waits until every workload has printed two more heartbeats, with no harm seen.
    #[track_caller]
    pub fn wait_ok(&self) {
        self.wait_beats(2);
    }

    /// Waits until every workload has printed this many more heartbeats, with no harm seen.
    #[track_caller]
    pub fn wait_beats(&self, count: usize) {
        let seen = |workload: &str| self.transcript().beats_by_workload().get(workload).map_or(0, Vec::len);
        for workload in self.guest.workloads() {
            let before = seen(&workload);
            let came = wait_until(DEADLINE, || (seen(&workload) >= before + count).then_some(()));
            if came.is_none() {
                self.fail(&format!("no {count} heartbeats of workload {workload:?}"));
            }
        }
        if let Some(harm) = self.transcript().harm() {
            self.fail(&harm);
        }
    }

    /// Waits until QEMU has ended.
    #[track_caller]
    pub fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let ended = wait_until(deadline, || self.exit_status());
        ended.unwrap_or_else(|| self.fail("QEMU has not ended"))
    }

    pub(crate) fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Fails the test with all that is known.
    #[track_caller]
    pub(crate) fn fail(&self, what: &str) -> ! {
        panic!(
            "{what}\n--- guest, which is {}:\n{}\n--- QEMU:\n{}",
            self.state(),
            self.transcript().tail(),
            self.stderr()
        )
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(spec: &VmSpec, start: Start, held: &Held, directory: &Path) -> Result<Command, Error> {
    let image = spec.guest.image()?;
    let path = |name: &str| directory.join(name).display().to_string();
    // A test that is killed must not leave a QEMU behind.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(qemu::program());
    command.args(["-nodefaults", "-display", "none", "-no-reboot", "-machine", "q35"]);
    command.args(["-accel", spec.accel.name(), "-m", &format!("{}M", spec.ram_mib)]);
    command.args(spec.backend.arguments(spec.ram_mib, held));
    command.arg("-kernel").arg(image.kernel).args(["-append", spec.guest.append()]);
    if let Some(initrd) = image.initrd {
        command.arg("-initrd").arg(initrd);
    }
    // Under TCG QEMU's own firmware is fast enough, and what it leaves in memory is worth moving too.
    if let (Accel::Kvm, Some(firmware)) = (spec.accel, image.firmware) {
        command.arg("-bios").arg(firmware);
    }
    for (number, disk) in spec.disks.iter().enumerate() {
        command.args(disk.arguments(number));
    }
    for socket in ["qmp.sock", "monitor.sock"] {
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", path(socket))]);
    }
    command.args(["-serial", &format!("file:{}", path("serial"))]);
    match start {
        Start::Running => {}
        Start::Paused => _ = command.arg("-S"),
        Start::Incoming => _ = command.args(["-incoming", "defer"]),
    }
    command.args(&spec.arguments);
    let stderr = File::create(path("stderr")).map_err(Error::io("can't write beside a VM"))?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    Ok(command)
}
