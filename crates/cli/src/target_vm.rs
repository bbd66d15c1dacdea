//! QEMU as the target of a migration.

use crate::runtime::{End, Record};
use migrate::{StartError, TargetVm, Trouble};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use qemu::qmp::QmpError;
use qemu::{Machine, Vm, VmError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use wire::{Hello, TargetState};

/// A QEMU that waits with `-incoming defer`.
pub struct QemuTarget {
    pub vm: Vm,
    pub machine: Machine,
    /// The migration that was agreed on.
    pub agreed: Arc<Mutex<Option<Hello>>>,
}

impl TargetVm for QemuTarget {
    fn load(&mut self, state: &[u8]) -> Result<(), Trouble> {
        let stream = qemu::device::compose(state, &self.machine.name, self.machine.page_bits)?;
        Ok(qemu::device::load(&mut self.vm, &stream)?)
    }

    fn record_commit(&mut self) -> Result<(), Trouble> {
        Ok(self.record(TargetState::Committed).keep()?)
    }

    fn start(&mut self) -> Result<(), StartError> {
        let record = self.record(TargetState::Running);
        if record.running {
            self.vm.cont().map_err(|error| match error {
                VmError::StillPaused { .. } | VmError::Qmp(QmpError::Refused { command: "cont", .. }) => {
                    StartError::Refused(error.into())
                }
                _ => StartError::Unsure(error.into()),
            })?;
        }
        // The guest runs: a disk that is full for a small record is no reason to stop it.
        if let Err(error) = record.keep() {
            eprintln!("whimbrel: cannot keep the record that the guest runs here: {error}");
        }
        Ok(())
    }

    /// Ends QEMU, by force if it does not end by itself: the source may run the guest only when this one can't.
    fn end(&mut self) -> Result<(), Trouble> {
        let asked = self.vm.quit();
        if asked.is_ok() && self.is_gone_within(QUIT_MAX) {
            return self.record_never();
        }
        let killed = kill(Pid::from_raw(self.vm.pid()), Signal::SIGKILL);
        if self.is_gone_within(QUIT_MAX) {
            return self.record_never();
        }
        let pid = self.vm.pid();
        Err(format!("QEMU {pid} does not end (quit: {asked:?}, SIGKILL: {killed:?})").into())
    }

    /// While QEMU waits, nothing but a reset writes to its RAM: it puts firmware and kernel back in place.
    fn has_written(&mut self) -> Result<bool, Trouble> {
        Ok(self.vm.qmp().events()?.iter().any(|event| event.name == "RESET"))
    }
}

impl QemuTarget {
    fn record(&self, state: TargetState) -> Record {
        let agreed = self.agreed.lock().expect("no holder panics");
        let hello = agreed.as_ref().expect("agreed before the first page");
        let (session, running) = (hello.session, hello.running);
        Record { session, end: End::Target, qemu_pid: self.vm.pid(), target: None, running, state }
    }

    fn record_never(&self) -> Result<(), Trouble> {
        Ok(self.record(TargetState::NeverCommitted).keep()?)
    }

    fn is_gone_within(&self, time_max: Duration) -> bool {
        let end = Instant::now() + time_max;
        while !self.vm.has_ended() {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }
}

/// A QEMU with a slow disk may take a while to write back.
const QUIT_MAX: Duration = Duration::from_secs(5);
