//! A run as tests write it: set-up, event, outcome.

use crate::fault::Fault;
use crate::log::Moment;
use crate::oracle::Violation;
use crate::plan::Plan;
use crate::world::World;
use crate::{End, Sabotage, Seed};
use engine::{Outcome, Owner, TargetOutcome, TargetPhase};
use std::time::Duration;
use wire::TargetState;

/// Two VMs and the migration between them. Every step is looked at by the oracle; what it finds is a panic with the
/// log of the run.
pub struct Pair {
    plan: Plan,
    world: Option<World>,
}

impl Pair {
    /// A plain pair.
    pub fn new(seed: Seed) -> Self {
        Self::planned(Plan::plain(seed))
    }

    /// A pair for a plan.
    pub fn planned(plan: Plan) -> Self {
        Self { plan, world: None }
    }

    /// The source never finds that a stop would fit, so precopy goes on until something ends it.
    pub fn with_endless_precopy(mut self) -> Self {
        self.plan.limits.downtime_max = Duration::ZERO;
        self.plan.habits.calm_after = u64::MAX;
        self
    }

    /// Both ends compare digests of RAM.
    pub fn with_verify(mut self) -> Self {
        self.plan.verify = true;
        self
    }

    /// Disks write the guest's RAM by direct I/O.
    pub fn with_direct_io(mut self) -> Self {
        self.plan.limits.direct_io = true;
        self.plan.habits.direct_io = 8;
        self
    }

    /// The guest is paused, and is to stay so.
    pub fn with_paused_guest(mut self) -> Self {
        self.plan.was_running = false;
        self
    }

    /// Something is wrong from the start.
    pub fn with_sabotage(mut self, sabotage: Sabotage) -> Self {
        self.plan.sabotage = Some(sabotage);
        self
    }

    /// Runs until this moment. Panics if it never comes.
    pub fn run_until(&mut self, moment: Moment) {
        let came = self.world().run_until(moment);
        let came = self.approved(came);
        assert!(came, "{moment:?} never came\n{}", self.log());
    }

    /// Runs until this moment, or to the end if it never comes.
    pub fn try_run_until(&mut self, moment: Moment) -> Result<bool, Violation> {
        self.world().run_until(moment)
    }

    /// Runs to the end.
    pub fn run(&mut self) {
        let ended = self.world().run();
        self.approved(ended);
    }

    /// Runs to the end, and tells what the oracle found.
    pub fn try_run(&mut self) -> Result<(), Violation> {
        self.world().run()
    }

    /// Does so many steps.
    pub fn step(&mut self, count: u64) {
        for _ in 0..count {
            let stepped = self.world().step();
            self.approved(stepped);
        }
    }

    /// Has something go wrong now.
    pub fn inflict(&mut self, fault: Fault) {
        self.world().inflict(fault);
    }

    /// Where the guest runs, if anywhere.
    pub fn guest_runs_at(&mut self) -> Option<End> {
        let world = self.world();
        match (world.source_vm().runs(), world.target_vm().runs()) {
            (true, false) => Some(End::Source),
            (false, true) => Some(End::Target),
            (false, false) => None,
            (true, true) => unreachable!("the oracle looked"),
        }
    }

    /// How the source says it ended. Panics if it was killed or goes on.
    pub fn outcome(&mut self) -> Outcome {
        self.world().source_outcome().expect("the source's end").clone()
    }

    /// How the target says it ended; none if it was killed, or lingers.
    pub fn target_outcome(&mut self) -> Option<TargetOutcome> {
        self.world().target_outcome().cloned()
    }

    /// How both ends ended, in a few words.
    pub fn ending(&mut self) -> String {
        let world = self.world();
        let given_back = world.log().has(Moment::Committed);
        let source = match world.source_outcome().map(|outcome| outcome.owner) {
            None => "source killed",
            Some(Owner::Source) if given_back => "given back",
            Some(Owner::Source) => "source owns",
            Some(Owner::Target) => "target owns",
            Some(Owner::InDoubt) => "in doubt",
            Some(Owner::SourceStopped) => "source stopped",
        };
        let target = match world.target_outcome() {
            _ if world.is_killed(End::Target) => "killed",
            None if world.target_phase() == Some(TargetPhase::Running) => "lingers",
            None => "waits",
            Some(TargetOutcome::Running) => "running",
            Some(TargetOutcome::Dropped(_)) => "dropped",
            Some(TargetOutcome::InDoubt(_)) => "in doubt",
        };
        format!("{source}, target {target}")
    }

    /// What the last one who asked was told.
    pub fn answer(&mut self) -> Option<TargetState> {
        self.world().answer()
    }

    /// Whether the VM at the target has been ended.
    pub fn target_vm_ended(&mut self) -> bool {
        self.world().target_vm().ended
    }

    /// Whether the VM at the source has been ended.
    pub fn source_vm_ended(&mut self) -> bool {
        self.world().source_vm().retired
    }

    /// Whether the moment has come.
    pub fn has(&mut self, moment: Moment) -> bool {
        self.world().log().has(moment)
    }

    /// Simulated time so far.
    pub fn now(&mut self) -> Duration {
        self.world().log().now
    }

    /// Steps so far.
    pub fn steps(&mut self) -> u64 {
        self.world().log().steps
    }

    /// What happened.
    pub fn log(&mut self) -> String {
        self.world().log().text()
    }

    fn world(&mut self) -> &mut World {
        let Self { plan, world } = self;
        world.get_or_insert_with(|| {
            let mut plan = plan.clone();
            if plan.sabotage == Some(Sabotage::DirectIoIsUnknown) {
                plan.limits.direct_io = false;
            }
            World::new(plan)
        })
    }

    fn approved<T>(&mut self, result: Result<T, Violation>) -> T {
        match result {
            Ok(value) => value,
            Err(violation) => panic!("{violation:?}\n{}", self.log()),
        }
    }
}
