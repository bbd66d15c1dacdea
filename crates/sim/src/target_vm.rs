//! The VM at the target, and the disk there that outlives whimbrel.

use crate::guest::{Guest, Habits};
use crate::log::{Log, Moment};
use crate::memory::Memory;
use crate::net::Life;
use crate::{How, Sabotage, Shared};
use migrate::{StartError, TargetVm, Trouble};
use std::sync::{Arc, MutexGuard};
use wire::TargetState;

/// What whimbrel asks of the VM at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetOp {
    /// Load the device state.
    Load,
    /// Keep the commit on disk.
    Record,
    /// Run the guest.
    Start,
    /// End the VM.
    End,
}

/// The VM at the target, as whoever looks from outside sees it.
pub(crate) struct TargetMachine {
    pub(crate) memory: Arc<Memory>,
    pub(crate) habits: Habits,
    /// There when the device state is loaded.
    pub(crate) guest: Option<Guest>,
    /// Whether the guest ran at the source.
    pub(crate) was_running: bool,
    pub(crate) started: bool,
    pub(crate) ended: bool,
    /// What the disk says about the migration.
    pub(crate) record: TargetState,
    pub(crate) failing: Vec<(TargetOp, How)>,
    pub(crate) sabotage: Option<Sabotage>,
    pub(crate) random: fastrand::Rng,
}

impl TargetMachine {
    /// Whether the guest runs.
    pub(crate) fn runs(&self) -> bool {
        self.guest.as_ref().is_some_and(Guest::is_running)
    }

    fn start(&mut self) {
        self.started = true;
        let runs = self.was_running;
        if let Some(guest) = &mut self.guest {
            guest.set_running(runs);
        }
    }

    fn end(&mut self) {
        self.guest = None;
        self.ended = true;
        self.record = TargetState::NeverCommitted;
    }
}

/// What whimbrel holds of the VM.
pub(crate) struct TargetHandle {
    pub(crate) machine: Shared<TargetMachine>,
    pub(crate) life: Life,
    pub(crate) log: Shared<Log>,
}

impl TargetHandle {
    /// Does `work`, unless it is to fail or whimbrel is to die at this.
    fn op<T>(&self, op: TargetOp, work: impl FnOnce(&mut TargetMachine) -> T) -> Result<T, Trouble> {
        if self.life.is_over() {
            return Err("dead".into());
        }
        let mut machine = self.machine();
        let at = machine.failing.iter().position(|(failing, _)| *failing == op);
        let how = at.map(|at| machine.failing.remove(at).1);
        self.line(format!("target vm: {op:?}{}", how.map_or(String::new(), |how| format!(", {how:?}"))));
        if how.is_none_or(How::is_done) {
            let done = work(&mut machine);
            if how.is_none() {
                return Ok(done);
            }
        }
        if how.is_some_and(How::kills) {
            self.life.end();
        }
        Err(format!("{op:?} was made to fail").into())
    }

    fn machine(&self) -> MutexGuard<'_, TargetMachine> {
        self.machine.lock().expect("no holder panics")
    }

    fn line(&self, text: String) {
        self.log.lock().expect("no holder panics").line(text);
    }

    fn note(&self, moment: Moment) {
        self.log.lock().expect("no holder panics").note(moment);
    }
}

impl TargetVm for TargetHandle {
    fn load(&mut self, state: &[u8]) -> Result<(), Trouble> {
        self.op(TargetOp::Load, |machine| {
            let (memory, random) = (machine.memory.clone(), machine.random.fork());
            let guest = Guest::restore(memory, machine.habits, random, state);
            machine.guest = Some(guest.ok_or("not a device state")?);
            self.note(Moment::Loaded);
            if machine.sabotage == Some(Sabotage::TargetStartsAtLoad) {
                machine.start();
            }
            Ok(())
        })?
    }

    fn record_commit(&mut self) -> Result<(), Trouble> {
        self.op(TargetOp::Record, |machine| {
            machine.record = TargetState::Committed;
            self.note(Moment::Recorded);
        })
    }

    fn start(&mut self) -> Result<(), StartError> {
        let next = self.machine().failing.iter().find(|(op, _)| *op == TargetOp::Start).map(|(_, how)| *how);
        let started = self.op(TargetOp::Start, |machine| {
            machine.start();
            machine.record = TargetState::Running;
            self.note(Moment::Started);
        });
        started.map_err(|error| match next {
            Some(How::Undone) => StartError::Refused(error),
            _ => StartError::Unsure(error),
        })
    }

    fn end(&mut self) -> Result<(), Trouble> {
        self.op(TargetOp::End, TargetMachine::end)
    }
}
