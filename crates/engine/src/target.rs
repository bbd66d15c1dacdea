//! The target's decisions: what to do with what arrives, and never to run the guest before *commit*.
//!
//! Invariant: [`TargetAction::Start`] follows [`TargetEvent::Recorded`], which follows [`TargetEvent::Committed`];
//! and once the target has said that it never runs the guest, nothing starts it.

use serde::Serialize;

/// Where the target stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetPhase {
    /// Agreeing with the source.
    Setup,
    /// Pages arrive.
    Active,
    /// RAM is complete; device state is being loaded, or is loaded and waits for *commit*.
    Device,
    /// *Commit* arrived: only this end may run the guest.
    Committed,
    /// The guest runs here.
    Running,
    /// Nothing is left to do.
    Ended,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetEvent {
    /// The source said hello and fits.
    Greeted,
    /// Every channel has passed the last sync point.
    AllIn,
    /// What was a hole at the source is zero here.
    Settled,
    /// The hashes of both ends are equal, or nobody asked for them.
    Verified,
    /// The device state has arrived whole.
    DeviceArrived,
    /// QEMU has loaded it and is paused.
    Loaded,
    /// *Commit* arrived.
    Committed,
    /// The commit record is on disk.
    Recorded,
    /// The guest runs.
    Started,
    /// QEMU would not start the guest: it never ran.
    NotStarted(String),
    /// Nobody knows whether the guest runs or has run.
    StartUnsure(String),
    /// The source knows that the guest runs here.
    Confirmed,
    /// The guest's QEMU is gone and the source was told.
    Relinquished,
    /// QEMU has been dropped.
    Dropped,
    /// Something broke: at the source, here, or between.
    Failed(String),
}

/// The one thing to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetAction {
    /// Accept and receive pages: `AllIn`.
    Receive,
    /// Make zero what was never announced: `Settled`.
    Settle,
    /// Compare hashes if asked: `Verified`.
    Verify,
    /// Wait for the device state: `DeviceArrived`.
    AwaitDevice,
    /// Load it: `Loaded`.
    Load,
    /// Say ready and wait: `Committed`.
    AwaitCommit,
    /// Write the commit record to disk: `Recorded`.
    Record,
    /// Run the guest: `Started`, `NotStarted` or `StartUnsure`.
    Start,
    /// Say that the guest runs and wait: `Confirmed`.
    AwaitConfirmed,
    /// The source never confirmed: answer whoever asks, until one does: `Confirmed`.
    Linger,
    /// End QEMU for good, then say that the guest never runs here: `Relinquished`.
    Relinquish,
    /// Leave the guest's QEMU: `Dropped`.
    Drop {
        /// It has loaded device state and is of no more use: end it.
        quit: bool,
    },
    /// It is over.
    End(TargetOutcome),
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetOutcome {
    /// The guest runs here.
    Running,
    /// The guest is the source's.
    Dropped(String),
    /// The guest may run here or have run, or QEMU would neither run it nor end: a person must look.
    InDoubt(String),
}

/// The target's end of a migration.
#[derive(Debug)]
pub struct Target {
    phase: TargetPhase,
    failure: Option<String>,
}

impl Default for Target {
    fn default() -> Self {
        Self { phase: TargetPhase::Setup, failure: None }
    }
}

impl Target {
    /// Where it stands.
    pub fn phase(&self) -> TargetPhase {
        self.phase
    }

    /// Takes what happened and tells the one thing to do next.
    pub fn on(&mut self, event: TargetEvent) -> TargetAction {
        match event {
            TargetEvent::Greeted => self.enter(TargetPhase::Active, TargetAction::Receive),
            TargetEvent::AllIn => TargetAction::Settle,
            TargetEvent::Settled => TargetAction::Verify,
            TargetEvent::Verified => TargetAction::AwaitDevice,
            TargetEvent::DeviceArrived => self.enter(TargetPhase::Device, TargetAction::Load),
            TargetEvent::Loaded => TargetAction::AwaitCommit,
            TargetEvent::Committed => self.enter(TargetPhase::Committed, TargetAction::Record),
            TargetEvent::Recorded => TargetAction::Start,
            TargetEvent::Started => self.enter(TargetPhase::Running, TargetAction::AwaitConfirmed),
            TargetEvent::NotStarted(reason) => {
                self.failure = Some(reason);
                TargetAction::Relinquish
            }
            // A guest that ran for a moment has written its disks: the source's would go back in time.
            TargetEvent::StartUnsure(reason) => self.end(TargetOutcome::InDoubt(reason)),
            TargetEvent::Confirmed => self.end(TargetOutcome::Running),
            TargetEvent::Relinquished | TargetEvent::Dropped => {
                let reason = self.failure.take().unwrap_or_default();
                self.end(TargetOutcome::Dropped(reason))
            }
            TargetEvent::Failed(reason) => self.fail(reason),
        }
    }

    fn fail(&mut self, reason: String) -> TargetAction {
        match self.phase {
            TargetPhase::Setup | TargetPhase::Active => self.leave(reason, false),
            TargetPhase::Device => self.leave(reason, true),
            // Only ending QEMU for good can fail here, after it would not start or the record not be written.
            TargetPhase::Committed if self.failure.is_some() => self.end(TargetOutcome::InDoubt(reason)),
            TargetPhase::Committed => {
                self.failure = Some(reason);
                TargetAction::Relinquish
            }
            TargetPhase::Running => TargetAction::Linger,
            TargetPhase::Ended => unreachable!("nothing is done after the end"),
        }
    }

    fn leave(&mut self, reason: String, quit: bool) -> TargetAction {
        if self.failure.is_some() {
            return self.end(TargetOutcome::Dropped(reason));
        }
        self.failure = Some(reason);
        TargetAction::Drop { quit }
    }

    fn enter(&mut self, phase: TargetPhase, action: TargetAction) -> TargetAction {
        self.phase = phase;
        action
    }

    fn end(&mut self, outcome: TargetOutcome) -> TargetAction {
        self.phase = TargetPhase::Ended;
        TargetAction::End(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TargetEvent as E;

    fn after(events: &[TargetEvent]) -> (Target, TargetAction) {
        let mut target = Target::default();
        let mut action = TargetAction::Receive;
        for event in events {
            action = target.on(event.clone());
        }
        (target, action)
    }

    fn loaded() -> Vec<TargetEvent> {
        vec![E::Greeted, E::AllIn, E::Settled, E::Verified, E::DeviceArrived, E::Loaded]
    }

    #[test]
    fn the_guest_starts_only_behind_a_commit_that_is_on_disk() {
        let (mut target, action) = after(&loaded());
        assert_eq!(action, TargetAction::AwaitCommit);
        assert_eq!(target.on(E::Committed), TargetAction::Record);
        assert_eq!(target.on(E::Recorded), TargetAction::Start);
    }

    #[test]
    fn a_failure_before_the_load_leaves_qemu_waiting_for_another_try() {
        let (_, action) = after(&[E::Greeted, E::Failed("cut".into())]);
        assert_eq!(action, TargetAction::Drop { quit: false });
    }

    #[test]
    fn a_failure_after_the_load_ends_qemu_because_it_holds_half_a_guest() {
        let mut events = loaded();
        events.push(E::Failed("cut".into()));
        assert_eq!(after(&events).1, TargetAction::Drop { quit: true });
    }

    #[test]
    fn a_guest_that_will_not_start_is_given_back() {
        let mut events = loaded();
        events.extend([E::Committed, E::Recorded, E::NotStarted("lock".into())]);
        let (mut target, action) = after(&events);
        assert_eq!(action, TargetAction::Relinquish);
        assert_eq!(target.on(E::Relinquished), TargetAction::End(TargetOutcome::Dropped("lock".into())));
    }

    #[test]
    fn a_guest_that_may_have_run_is_not_given_back() {
        let mut events = loaded();
        events.extend([E::Committed, E::Recorded, E::StartUnsure("late".into())]);
        assert_eq!(after(&events).1, TargetAction::End(TargetOutcome::InDoubt("late".into())));
    }

    #[test]
    fn a_guest_that_runs_is_never_dropped_for_want_of_a_confirmation() {
        let mut events = loaded();
        events.extend([E::Committed, E::Recorded, E::Started, E::Failed("cut".into())]);
        assert_eq!(after(&events).1, TargetAction::Linger);
    }
}
