//! The VM at the source with the watchdog beside it, which outlives whimbrel.

use crate::guest::Guest;
use crate::log::{Log, Moment};
use crate::memory::Memory;
use crate::net::{Life, Partly};
use crate::tracker::SimTracker;
use crate::{How, Sabotage, Shared};
use dirty::Tracker;
use migrate::{Attached, CommitError, CommitLine, SourceVm, Trouble};
use ram::{PageSets, Reach};
use std::io;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

/// What whimbrel asks of the VM at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceOp {
    /// Watch writes.
    Attach,
    /// Stop the guest.
    Stop,
    /// Run it again.
    Resume,
    /// Save the device state.
    Save,
    /// Disarm the watchdog and send *commit*.
    Commit,
    /// End the VM.
    Retire,
}

/// The VM at the source, as whoever looks from outside sees it.
pub(crate) struct SourceMachine {
    pub(crate) guest: Shared<Guest>,
    pub(crate) memory: Arc<Memory>,
    /// Whether the guest ran before; one that its owner has paused stays so.
    pub(crate) was_running: bool,
    pub(crate) watchdog: Watchdog,
    pub(crate) retired: bool,
    pub(crate) failing: Vec<(SourceOp, How)>,
    /// What went wrong, other than by whimbrel's own death.
    pub(crate) failed: Vec<SourceOp>,
    pub(crate) sabotage: Option<Sabotage>,
    pub(crate) random: fastrand::Rng,
}

/// The process that runs the guest again if whimbrel dies with the guest stopped.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watchdog {
    pub(crate) armed: bool,
    pub(crate) fires_at: Option<Duration>,
    /// It was killed.
    pub(crate) lost: bool,
}

impl SourceMachine {
    /// Whether the guest runs.
    pub(crate) fn runs(&self) -> bool {
        self.guest.lock().expect("no holder panics").is_running()
    }

    /// Whimbrel has died at `now`.
    pub(crate) fn whimbrel_died(&mut self, now: Duration) {
        if self.watchdog.armed {
            let late = Duration::from_millis(self.random.u64(1..WATCHDOG_MS_MAX));
            self.watchdog.fires_at = Some(now + late);
        }
    }

    /// The watchdog does its duty if its time has come.
    pub(crate) fn watch(&mut self, now: Duration) -> bool {
        let due = self.watchdog.fires_at.is_some_and(|at| now >= at);
        if due {
            self.watchdog = Watchdog::default();
            self.run(true);
        }
        due
    }

    /// A person runs the guest again.
    pub(crate) fn run(&mut self, running: bool) {
        if self.was_running {
            self.guest.lock().expect("no holder panics").set_running(running);
        }
    }

    fn stop(&mut self) {
        let mut guest = self.guest.lock().expect("no holder panics");
        if self.sabotage != Some(Sabotage::StopDoesNotDrain) {
            guest.drain();
        }
        guest.set_running(false);
    }

    fn failure(&mut self, op: SourceOp) -> Option<How> {
        let at = self.failing.iter().position(|(failing, _)| *failing == op)?;
        let (_, how) = self.failing.remove(at);
        if !how.kills() {
            self.failed.push(op);
        }
        Some(how)
    }
}

/// What whimbrel holds of the VM.
pub(crate) struct SourceHandle {
    pub(crate) machine: Shared<SourceMachine>,
    pub(crate) life: Life,
    pub(crate) log: Shared<Log>,
}

impl SourceHandle {
    /// Does `work`, unless it is to fail or whimbrel is to die at this.
    fn op<T>(&self, op: SourceOp, work: impl FnOnce(&mut SourceMachine) -> T) -> Result<T, Trouble> {
        if self.life.is_over() {
            return Err("dead".into());
        }
        let mut machine = self.machine();
        let how = machine.failure(op);
        self.line(format!("source vm: {op:?}{}", how.map_or(String::new(), |how| format!(", {how:?}"))));
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

    fn machine(&self) -> MutexGuard<'_, SourceMachine> {
        self.machine.lock().expect("no holder panics")
    }

    fn line(&self, text: String) {
        self.log.lock().expect("no holder panics").line(text);
    }

    fn note(&self, moment: Moment) {
        self.log.lock().expect("no holder panics").note(moment);
    }

    fn attach_now(&mut self, quiesced: bool, populated: &mut PageSets) -> Result<Attached, Trouble> {
        let (memory, sabotage) = {
            let machine = self.machine();
            (machine.memory.clone(), machine.sabotage)
        };
        let mut tracker = SimTracker::new(memory.clone(), sabotage);
        if quiesced {
            self.stop()?;
        }
        tracker.arm()?;
        if quiesced {
            self.resume()?;
        }
        memory.meanwhile();
        memory.populated(populated)?;
        self.note(Moment::Armed);
        Ok(Attached { tracker: Box::new(tracker), ram: memory })
    }
}

impl SourceVm for SourceHandle {
    fn attach(&mut self, quiesced: bool, populated: &mut PageSets) -> Result<Attached, Trouble> {
        self.op(SourceOp::Attach, |_| ())?;
        self.attach_now(quiesced, populated)
    }

    fn stop(&mut self) -> Result<(), Trouble> {
        if !self.life.is_over() {
            let mut machine = self.machine();
            let arms = machine.was_running && machine.sabotage != Some(Sabotage::WatchdogIsNotArmed);
            machine.watchdog.armed |= arms;
        }
        self.op(SourceOp::Stop, SourceMachine::stop)
    }

    fn resume(&mut self) -> Result<(), Trouble> {
        self.op(SourceOp::Resume, |machine| {
            machine.run(true);
            machine.watchdog.armed = false;
        })
    }

    fn save(&mut self) -> Result<Vec<u8>, Trouble> {
        self.op(SourceOp::Save, |machine| {
            let mut guest = machine.guest.lock().expect("no holder panics");
            for _ in 0..machine.random.u8(..3) {
                guest.write(machine.random.usize(..machine.memory.slots()));
            }
            let state = guest.state();
            self.note(Moment::Saved);
            state
        })
    }

    fn commit(&mut self, line: &mut dyn CommitLine) -> Result<(), CommitError> {
        let lost = |(op, how): &(SourceOp, How)| *op == SourceOp::Commit && !how.kills();
        let lost = self.machine().failing.iter().any(lost);
        if lost {
            // The watchdog is lost before it wrote anything, or before it could say so.
            self.machine().watchdog = Watchdog { lost, ..Watchdog::default() };
            self.note(Moment::Committed);
        }
        let sent = self.op(SourceOp::Commit, |machine| {
            let armed = machine.watchdog.armed;
            machine.watchdog.armed &= machine.sabotage == Some(Sabotage::CommitDoesNotDisarm);
            let sent = line.send();
            if sent.as_ref().is_err_and(|error| sent_bytes(error) == 0) {
                machine.watchdog.armed = armed;
            } else {
                self.note(Moment::Committed);
            }
            sent
        });
        match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) if sent_bytes(&error) == 0 => Err(CommitError::Unsent(error)),
            // Whether the watchdog wrote the commit before it was lost, nobody can say.
            Ok(Err(error)) | Err(error) => Err(CommitError::Unsure(error)),
        }
    }

    fn retire(&mut self) -> Result<(), Trouble> {
        self.op(SourceOp::Retire, |machine| machine.retired = true)
    }
}

fn sent_bytes(error: &Trouble) -> usize {
    let error = error.downcast_ref::<io::Error>().and_then(|error| error.get_ref());
    error.and_then(|error| error.downcast_ref::<Partly>()).map_or(0, |partly| partly.sent)
}

/// DESIGN's promise: a guest that whimbrel left stopped runs again within a second.
const WATCHDOG_MS_MAX: u64 = 1000;
