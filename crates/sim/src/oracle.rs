//! What must hold whatever goes wrong. Looks at the two VMs from outside, never at what whimbrel believes, except to
//! compare the two.

use crate::End;
use crate::fault::Fault;
use crate::memory::{first_difference, first_excess};
use crate::net::Link;
use crate::source_vm::SourceOp;
use crate::world::World;
use engine::{Outcome, Owner, TargetOutcome};
use wire::{Message, TargetState};

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub rule: Rule,
    /// How.
    pub text: String,
}

/// What whimbrel promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Never do both guests run.
    NeverBoth,
    /// Once the guest ran at the target it never runs at the source again: it would go back in time.
    NeverBack,
    /// The target runs the guest only behind a commit.
    CommitFirst,
    /// The target has the source's RAM before it loads the device state, and when it starts.
    SameRam,
    /// The guest finds no page lost.
    GuestFindsAll,
    /// The target has no page that the source does not have.
    AsSparse,
    /// A hole is never read.
    HolesUnread,
    /// The watchdog is armed whenever the guest is stopped before commit.
    Watched,
    /// A migration that fails before commit leaves the guest running at the source.
    SourceRunsOn,
    /// Somebody runs the guest, or it can be found out who may.
    NeverNeither,
    /// What an end says of the owner is so.
    TrueOutcome,
    /// Nobody is left in doubt who could have been told.
    NoNeedlessDoubt,
    /// No trace is left in the source's VM.
    NoTrace,
    /// A run ends.
    Ends,
}

/// What somebody sees who looks at both VMs from outside.
pub(crate) struct Sight {
    pub(crate) source_runs: bool,
    pub(crate) source_retired: bool,
    pub(crate) was_running: bool,
    /// A watchdog is armed, or has been killed.
    pub(crate) watched: bool,
    pub(crate) watchdog_lost: bool,
    pub(crate) target_loaded: bool,
    pub(crate) target_started: bool,
    pub(crate) target_runs: bool,
    pub(crate) record: TargetState,
    pub(crate) committed: bool,
}

/// Looks at every step.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    loaded: bool,
    started: bool,
    ran_at_target: bool,
}

impl Oracle {
    /// Looks at what a step has led to.
    pub(crate) fn look(&mut self, world: &World) -> Result<(), Violation> {
        let sight = world.sight();
        let trust = Trust::of(world);
        self.ran_at_target |= sight.target_runs;
        if trust.words {
            require(Rule::NeverBoth, !(sight.source_runs && sight.target_runs), || "both guests run".into())?;
            require(Rule::NeverBack, !(sight.source_runs && self.ran_at_target), || {
                "the guest runs at the source after it ran at the target".into()
            })?;
            require(Rule::CommitFirst, !sight.target_runs || sight.committed, || {
                "the target runs a guest that was not committed".into()
            })?;
        }
        let stopped = sight.was_running && !sight.source_runs && !sight.committed;
        require(Rule::Watched, !stopped || sight.watched, || {
            "the guest is stopped and nobody watches over it".into()
        })?;
        let loads = sight.target_loaded && !std::mem::replace(&mut self.loaded, sight.target_loaded);
        let starts = sight.target_started && !std::mem::replace(&mut self.started, sight.target_started);
        if loads && trust.pages && !sight.source_runs {
            same_ram(world, "the device state is loaded")?;
        }
        if starts && trust.pages {
            arrived_whole(world, trust)?;
        }
        Ok(())
    }

    /// Looks at how it ended.
    pub(crate) fn judge(&self, world: &World) -> Result<(), Violation> {
        let (source, target) = world.memories();
        require(Rule::NoTrace, !source.is_watched(), || "writes are still watched".into())?;
        let holes = (source.holes_read(), target.holes_read());
        require(Rule::HolesUnread, holes == (0, 0), || format!("holes were read: {holes:?}"))?;
        let sight = world.sight();
        if !Trust::of(world).words {
            return Ok(());
        }
        if sight.was_running {
            source_runs_on(world, &sight)?;
            somebody_runs(world, &sight)?;
        }
        true_outcomes(world, &sight)?;
        no_needless_doubt(world)
    }
}

/// How far what the ends were sent is what the other end sent.
#[derive(Clone, Copy, Debug)]
struct Trust {
    /// No word on which the hand-over hangs was forged. Against a peer that lies about its own guest nothing helps.
    words: bool,
    /// Pages arrived as they were sent, or digests were compared.
    pages: bool,
    /// Nothing was forged at all.
    all: bool,
}

impl Trust {
    fn of(world: &World) -> Self {
        let decisive = |fault: &Fault| {
            matches!(
                fault,
                Fault::Forge(End::Target, Message::Commit)
                    | Fault::Forge(End::Source, Message::Running | Message::Answer { .. })
            )
        };
        let all = !world.inflicted().iter().any(Fault::is_lie);
        Self { words: !world.inflicted().iter().any(decisive), pages: all || world.plan().verify, all }
    }
}

fn same_ram(world: &World, moment: &str) -> Result<(), Violation> {
    let (source, target) = world.memories();
    match first_difference(&source, &target) {
        None => Ok(()),
        Some(slot) => {
            fail(Rule::SameRam, format!("when {moment}, page {slot} differs: {:?}", source.place(slot)))
        }
    }
}

fn arrived_whole(world: &World, trust: Trust) -> Result<(), Violation> {
    same_ram(world, "the guest starts")?;
    let lost = world.lost_at_target();
    require(Rule::GuestFindsAll, lost.is_none(), || format!("the guest has lost a page: {lost:?}"))?;
    let (source, target) = world.memories();
    let excess = first_excess(&source, &target).filter(|_| trust.all);
    require(Rule::AsSparse, excess.is_none(), || format!("page {excess:?} exists at the target only"))
}

fn source_runs_on(world: &World, sight: &Sight) -> Result<(), Violation> {
    let broken = sight.watchdog_lost || world.has_failed(SourceOp::Resume);
    let due = !sight.committed && !broken;
    require(Rule::SourceRunsOn, !due || sight.source_runs, || {
        "no commit was written, and the guest does not run at the source".into()
    })
}

/// Nobody may be left without the guest unless a whimbrel was killed, or a person was told to look.
fn somebody_runs(world: &World, sight: &Sight) -> Result<(), Violation> {
    if sight.source_runs || sight.target_runs {
        return Ok(());
    }
    let told = match world.source_outcome() {
        Some(outcome) => matches!(outcome.owner, Owner::InDoubt | Owner::SourceStopped),
        None => true, // Killed, and a killed program tells nobody anything.
    };
    require(Rule::NeverNeither, told, || "nobody runs the guest, and nobody says so".into())?;
    let stopped = matches!(world.source_outcome(), Some(Outcome { owner: Owner::SourceStopped, .. }));
    let target_told = matches!(world.target_outcome(), Some(TargetOutcome::InDoubt(_)));
    let excused = stopped || target_told || world.is_killed(End::Target) || sight.watchdog_lost;
    let known = world.answer().unwrap_or(sight.record) == TargetState::NeverCommitted;
    require(Rule::NeverNeither, known || excused, || {
        format!("nobody runs the guest, and asking is of no use: {:?}", world.answer())
    })
}

fn true_outcomes(world: &World, sight: &Sight) -> Result<(), Violation> {
    if let Some(outcome) = world.source_outcome() {
        let true_word = match outcome.owner {
            Owner::Source => sight.source_runs == sight.was_running && !sight.target_runs,
            Owner::Target => sight.target_started && !sight.source_runs,
            Owner::InDoubt => sight.committed,
            Owner::SourceStopped => world.has_failed(SourceOp::Resume),
        };
        require(Rule::TrueOutcome, true_word, || {
            format!("{outcome:?}, but source {} target {}", sight.source_runs, sight.target_runs)
        })?;
        let retired = sight.source_retired || world.has_failed(SourceOp::Retire);
        require(Rule::TrueOutcome, outcome.owner != Owner::Target || retired, || {
            "the source's VM is left behind".into()
        })?;
    }
    let true_word = match world.target_outcome() {
        Some(TargetOutcome::Running) => sight.target_started,
        Some(TargetOutcome::Dropped(_)) => !sight.target_runs,
        Some(TargetOutcome::InDoubt(_)) | None => true,
    };
    require(Rule::TrueOutcome, true_word, || {
        format!("{:?}, but runs: {}", world.target_outcome(), sight.target_runs)
    })
}

fn no_needless_doubt(world: &World) -> Result<(), Violation> {
    let hinders = |fault: &Fault| {
        let questions = |link| link == Link::Question;
        match fault {
            Fault::Cut(link) | Fault::CutAfter(link, ..) => questions(*link),
            Fault::Stall(link, ..) | Fault::HalfOpen(link, _) => questions(*link),
            // A person who asked knows, and the target need not wait for the source any more.
            Fault::Ask => true,
            Fault::SourceFails(..) | Fault::Cancel(End::Source) => false,
            Fault::Kill(end) | Fault::RamFails(end, _) => *end == End::Target,
            _ => true,
        }
    };
    let hindered = world.inflicted().iter().any(hinders);
    let doubt = matches!(world.source_outcome(), Some(Outcome { owner: Owner::InDoubt, .. }));
    require(Rule::NoNeedlessDoubt, hindered || !doubt, || {
        format!("{:?}, target {:?}", world.source_outcome(), world.target_outcome())
    })
}

/// What is wrong with a run that does not end.
pub(crate) fn endless(world: &World) -> Violation {
    let (steps, now) = world.time();
    let (source, target) = (world.source_outcome(), world.target_phase());
    let text = format!("after {steps} steps and {now:?}: source {source:?}, target in {target:?}");
    Violation { rule: Rule::Ends, text }
}

fn require(rule: Rule, holds: bool, text: impl FnOnce() -> String) -> Result<(), Violation> {
    if holds { Ok(()) } else { fail(rule, text()) }
}

fn fail(rule: Rule, text: String) -> Result<(), Violation> {
    Err(Violation { rule, text })
}
