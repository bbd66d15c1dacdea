//! The two QEMUs of a move. A source whose RAM stays as it was is moved again and again; each move has a new target.

use crate::case::{Case, Memory};
use crate::cpu;
use crate::monitor::Monitor;
use crate::settings::Settings;
use harness::{Vm, VmSpec};
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

/// One QEMU, and what watches it.
pub struct End {
    /// The process. Its QMP socket is whimbrel's.
    pub vm: Vm,
    /// Our own monitor.
    pub monitor: Monitor,
    _directory: TempDir,
}

impl End {
    fn start(spec: VmSpec, start: fn(&VmSpec) -> Result<Vm, harness::Error>) -> Result<Self, harness::Error> {
        let directory =
            tempfile::Builder::new().prefix("whimbrel-bench-").tempdir().expect("a place for a socket");
        let socket: PathBuf = directory.path().join("events.sock");
        let vm = start(&spec.arg("-qmp").arg(&format!("unix:{},server=on,wait=off", socket.display())))?;
        Ok(Self { monitor: Monitor::connect(&socket), vm, _directory: directory })
    }

    /// CPU time of this QEMU without that of its guest.
    pub fn cpu(&mut self) -> Duration {
        let cpus = self.monitor.execute("query-cpus-fast", json!({}));
        let threads = cpus.as_array().expect("a list of vCPUs").iter().map(|cpu| cpu["thread-id"].as_u64());
        let pid = self.vm.pid();
        let guest: Duration = threads.map(|thread| cpu::of_thread(pid, thread.expect("a thread each"))).sum();
        cpu::of_process(pid) - guest
    }
}

/// Where the guest is.
pub struct Source {
    case: Case,
    memory: Memory,
    is_fresh: bool,
    /// Its QEMU.
    pub end: End,
}

impl Source {
    /// A guest that has filled its RAM.
    pub fn boot(settings: &Settings, case: Case, memory: Memory) -> Result<Self, harness::Error> {
        let end = End::start(spec(settings, case, memory), VmSpec::boot)?;
        end.vm.wait_line("ready");
        end.vm.wait_ok();
        if !case.runs() {
            end.vm.pause();
        }
        Ok(Self { case, memory, is_fresh: true, end })
    }

    /// Ready to be moved, as it was at first.
    pub fn make_ready(&mut self, settings: &Settings) -> Result<(), harness::Error> {
        if !std::mem::take(&mut self.is_fresh) {
            if self.case.keeps_source() {
                // QEMU moves no guest that was moved before and did not run since.
                self.end.vm.resume();
                self.end.vm.pause();
            } else {
                *self = Self::boot(settings, self.case, self.memory)?;
                self.is_fresh = false;
            }
        }
        self.end.monitor.forget_events();
        Ok(())
    }
}

/// Where the guest goes.
pub struct Target {
    case: Case,
    /// Its QEMU.
    pub end: End,
}

impl Target {
    /// A QEMU that waits, with all of its RAM allocated.
    pub fn boot(settings: &Settings, case: Case, memory: Memory) -> Result<Self, harness::Error> {
        let end = End::start(spec(settings, case, memory).arg("-mem-prealloc"), VmSpec::await_incoming)?;
        Ok(Self { case, end })
    }

    /// Panics unless the guest is here, and unharmed as far as it can tell.
    pub fn expect_guest(&self, source: &Source) {
        let state = self.end.vm.state();
        let wanted = if self.case.runs() { "running" } else { "paused" };
        assert!(state == wanted, "the target is {state} after the move, it should be {wanted}");
        assert!(!source.end.vm.is_running(), "the source runs after the move");
        self.end.vm.resume();
        self.end.vm.wait_beats(2);
    }

    /// Waits until the guest may run here.
    pub fn wait_resumed(&mut self) -> Duration {
        self.end.monitor.wait("RESUME", |_| true).at
    }
}

/// From the source's stop to the target's start, by the clocks of the QEMUs themselves. None if it did not run.
pub fn downtime(case: Case, source: &mut Source, target: &mut Target) -> Option<Duration> {
    case.runs().then(|| {
        let stopped = source.end.monitor.wait("STOP", |_| true).at;
        target.wait_resumed() - stopped
    })
}

impl Source {
    /// What it is measured for.
    pub fn case(&self) -> Case {
        self.case
    }
}

fn spec(settings: &Settings, case: Case, memory: Memory) -> VmSpec {
    VmSpec::new(case.guest()).accel(settings.accel).backend(memory.backend()).ram_mib(settings.ram_mib)
}
