//! Everything that takes part in a run, and whose turn it is: one actor does one step, then another that the seed
//! picks. When nobody has anything to do, time goes on to when somebody has.

use crate::fault::{Fault, Planned, When};
use crate::guest::{Guest, Lost};
use crate::log::{Log, Moment};
use crate::memory::Memory;
use crate::net::{Harm, Life, Net, WireId};
use crate::oracle::{Oracle, Sight, Violation, endless};
use crate::plan::Plan;
use crate::question::Question;
use crate::source_end::SourceEnd;
use crate::source_vm::{SourceHandle, SourceMachine, SourceOp, Watchdog};
use crate::target_end::TargetEnd;
use crate::target_vm::TargetMachine;
use crate::{End, Sabotage, Shared, shared};
use engine::{Outcome, Phase, TargetOutcome, TargetPhase};
use ram::PAGE;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;
use wire::{Session, TargetState};

/// A run.
pub(crate) struct World {
    plan: Plan,
    random: fastrand::Rng,
    now: Duration,
    log: Shared<Log>,
    net: Shared<Net>,
    source_vm: Shared<SourceMachine>,
    target_vm: Shared<TargetMachine>,
    source: SourceEnd,
    target: TargetEnd,
    questions: Vec<Question>,
    faults: Vec<Planned>,
    inflicted: Vec<Fault>,
    /// Actors that may have something to do.
    awake: Vec<Actor>,
    sluggish: Actor,
    buried: [bool; 2],
    /// Until when the main thread of an end does nothing, and until when nothing of it does.
    frozen_until: [Duration; 2],
    suspended_until: [Duration; 2],
    oracle: Oracle,
}

/// Somebody who does steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Actor {
    Guest(End),
    Main(End),
    Reader(End),
    Beat(End),
    Channel(End, usize),
    Question(usize),
    SourceAsks,
    Look,
    Listener,
    Caller(usize),
    Pipe(WireId, End),
    Watchdog,
}

impl World {
    /// A run that has not begun.
    pub(crate) fn new(plan: Plan) -> Self {
        let mut random = fastrand::Rng::with_seed(plan.seed.0 ^ 0x776f_726c_6400);
        let log = shared(Log::default());
        let net = shared(Net::new(random.fork()));
        let (source_vm, memory) = source_vm(&plan, &mut random);
        let (target_vm, target_memory) = target_vm(&plan, &mut random);
        let lives = [Life::new(), Life::new()];
        let handle = SourceHandle { machine: source_vm.clone(), life: lives[0].clone(), log: log.clone() };
        let [source_life, target_life] = lives;
        let target =
            TargetEnd::new(&plan, net.clone(), log.clone(), target_life, target_vm.clone(), target_memory);
        let source = SourceEnd::new(&plan, net.clone(), log.clone(), source_life, handle, memory);
        let sluggish = [
            Actor::Main(End::Source),
            Actor::Main(End::Target),
            Actor::Channel(End::Source, 0),
            Actor::Channel(End::Target, 0),
            Actor::Pipe(0, End::Target),
            Actor::Pipe(1, End::Target),
            Actor::Guest(End::Source),
        ];
        Self {
            faults: plan.faults.clone(),
            sluggish: sluggish[random.usize(..sluggish.len())],
            plan,
            random,
            now: Duration::ZERO,
            log,
            net,
            source_vm,
            target_vm,
            source,
            target,
            questions: vec![],
            inflicted: vec![],
            awake: vec![],
            buried: [false; 2],
            frozen_until: [Duration::ZERO; 2],
            suspended_until: [Duration::ZERO; 2],
            oracle: Oracle::default(),
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().expect("no holder panics")
    }

    /// Steps so far, and simulated time.
    pub(crate) fn time(&self) -> (u64, Duration) {
        (self.log().steps, self.now)
    }

    /// What somebody sees who looks from outside.
    pub(crate) fn sight(&self) -> Sight {
        let (source, target) = (self.source_vm(), self.target_vm());
        Sight {
            source_runs: source.runs(),
            source_retired: source.retired,
            was_running: source.was_running,
            watched: source.watchdog.armed || source.watchdog.lost,
            watchdog_lost: source.watchdog.lost,
            target_loaded: target.guest.is_some(),
            target_started: target.started,
            target_runs: target.runs(),
            record: target.record,
            committed: self.log().has(Moment::Committed),
        }
    }

    /// RAM of the source and of the target.
    pub(crate) fn memories(&self) -> (Arc<Memory>, Arc<Memory>) {
        (self.source_vm().memory.clone(), self.target_vm().memory.clone())
    }

    /// A page that the guest at the target misses.
    pub(crate) fn lost_at_target(&self) -> Option<Lost> {
        self.target_vm().guest.as_ref()?.check().err()
    }

    /// Whether this went wrong at the source's VM, other than by whimbrel's own death.
    pub(crate) fn has_failed(&self, op: SourceOp) -> bool {
        self.source_vm().failed.contains(&op)
    }

    pub(crate) fn source_vm(&self) -> MutexGuard<'_, SourceMachine> {
        self.source_vm.lock().expect("no holder panics")
    }

    pub(crate) fn target_vm(&self) -> MutexGuard<'_, TargetMachine> {
        self.target_vm.lock().expect("no holder panics")
    }

    pub(crate) fn source_outcome(&self) -> Option<&Outcome> {
        self.source.outcome()
    }

    pub(crate) fn target_outcome(&self) -> Option<&TargetOutcome> {
        self.target.outcome()
    }

    pub(crate) fn target_phase(&self) -> Option<TargetPhase> {
        self.target.phase()
    }

    pub(crate) fn is_killed(&self, end: End) -> bool {
        match end {
            End::Source => self.source.is_killed(),
            End::Target => self.target.is_killed(),
        }
    }

    /// What has gone wrong so far.
    pub(crate) fn inflicted(&self) -> &[Fault] {
        &self.inflicted
    }

    /// What the last one who asked was told.
    pub(crate) fn answer(&self) -> Option<TargetState> {
        self.questions.last()?.answer()?.as_ref().ok().copied()
    }

    /// Steps until this moment; false if it never comes.
    pub(crate) fn run_until(&mut self, moment: Moment) -> Result<bool, Violation> {
        while !self.log().has(moment) {
            if self.is_quiet() {
                return Ok(false);
            }
            self.step()?;
        }
        Ok(true)
    }

    /// Steps until nothing more will happen, then asks, as a person would, where that is needed.
    pub(crate) fn run(&mut self) -> Result<(), Violation> {
        self.settle()?;
        let Sight { source_runs, target_runs, was_running, .. } = self.sight();
        if was_running && !source_runs && !target_runs && !self.target.is_gone() {
            self.resolve()?;
        }
        self.oracle.judge(self)
    }

    fn settle(&mut self) -> Result<(), Violation> {
        while !self.is_quiet() {
            self.step()?;
        }
        Ok(())
    }

    /// What `whimbrel resolve --start` does at the source, with the network back.
    fn resolve(&mut self) -> Result<(), Violation> {
        self.net().heal();
        self.ask(self.source.session);
        self.settle()?;
        if self.answer() == Some(TargetState::NeverCommitted) {
            self.source_vm().run(true);
        }
        (0..AFTERMATH_STEPS).try_for_each(|_| self.step())
    }

    /// One step of somebody.
    pub(crate) fn step(&mut self) -> Result<(), Violation> {
        let steps = {
            let mut log = self.log();
            log.steps += 1;
            log.now = self.now;
            log.steps
        };
        if steps > STEPS_MAX || self.now > TIME_MAX {
            return Err(endless(self));
        }
        self.inflict_what_is_due(steps);
        if self.awake.is_empty() {
            self.wake_all();
        }
        let at = self.random.usize(..self.awake.len());
        let actor = self.awake[at];
        if actor == self.sluggish && self.random.u32(..self.plan.sluggishness) > 0 {
            return Ok(());
        }
        if self.act(actor) {
            self.pass_time();
            self.wake_all();
        } else {
            self.awake.swap_remove(at);
            if self.awake.is_empty() {
                self.wait();
            }
        }
        self.bury();
        self.note_moments();
        let mut oracle = std::mem::take(&mut self.oracle);
        let found = oracle.look(self);
        self.oracle = oracle;
        found
    }

    /// Has something go wrong now.
    pub(crate) fn inflict(&mut self, fault: Fault) {
        self.log().line(format!("fault: {fault:?}"));
        match &fault {
            Fault::Cut(link) => self.net().harm(*link, Harm::Cut),
            Fault::CutAfter(link, end, bytes) => {
                let at = self.net().carried(*link, *end) + bytes;
                self.net().harm(*link, Harm::CutAt(*end, at));
            }
            Fault::Stall(link, end, time) => self.net().harm(*link, Harm::Stall(*end, *time)),
            Fault::HalfOpen(link, end) => self.net().harm(*link, Harm::Kill(*end)),
            Fault::NetworkDown(time) => self.net().go_down(*time),
            Fault::Flip(link, end, bytes, bits) => {
                let at = self.net().carried(*link, *end) + bytes;
                self.net().harm(*link, Harm::Flip(*end, at, *bits));
            }
            Fault::Forge(end, message) => {
                let mut bytes = vec![];
                message.encode(&mut bytes).expect("forgeries are short");
                self.net().inject(crate::Link::Control, *end, &bytes);
            }
            Fault::Garbage(link, end, bytes) => self.net().inject(*link, *end, bytes),
            Fault::Kill(End::Source) => self.source.kill(),
            Fault::Kill(End::Target) => self.target.kill(),
            Fault::Suspend(end, time) => self.suspended_until[*end as usize] = self.now + *time,
            Fault::Freeze(end, time) => self.frozen_until[*end as usize] = self.now + *time,
            Fault::Cancel(End::Source) => self.source.cancel(),
            Fault::Cancel(End::Target) => self.target.cancel(),
            Fault::Ask => self.ask(self.source.session),
            Fault::AskAsStranger => self.ask(Session([1; 16])),
            Fault::Intrude(bytes) => self.net().intrude(bytes),
            Fault::SourceFails(op, how) => self.source_vm().failing.push((*op, *how)),
            Fault::TargetFails(op, how) => self.target_vm().failing.push((*op, *how)),
            Fault::RamFails(End::Source, accesses) => self.source_vm().memory.fail_after(*accesses),
            Fault::RamFails(End::Target, accesses) => self.target_vm().memory.fail_after(*accesses),
        }
        self.inflicted.push(fault);
        self.bury();
        self.wake_all();
    }

    fn ask(&mut self, session: Session) {
        let question = Question::new(self.net.clone(), Life::new(), session, self.now, self.now);
        self.questions.push(question);
    }

    fn inflict_what_is_due(&mut self, steps: u64) {
        let is_due = |planned: &Planned| match planned.when {
            When::Step(step) => steps >= step,
            When::After(moment, later) => {
                self.log().step_of(moment).is_some_and(|step| steps >= step + later)
            }
        };
        let Some(at) = self.faults.iter().position(is_due) else { return };
        let planned = self.faults.swap_remove(at);
        self.inflict(planned.fault);
    }

    fn act(&mut self, actor: Actor) -> bool {
        let now = self.now;
        if self.sleeps(actor) {
            return false;
        }
        match actor {
            Actor::Guest(end) => {
                self.run_guest(end);
                false // It never waits, and nobody waits for it.
            }
            Actor::Main(End::Source) => self.source.step_collector(now),
            Actor::Main(End::Target) => self.target.step_keeper(now),
            Actor::Reader(End::Source) => self.source.step_reader(),
            Actor::Reader(End::Target) => self.target.step_reader(),
            Actor::Beat(End::Source) => self.source.step_beat(now),
            Actor::Beat(End::Target) => self.target.step_beat(now),
            Actor::Channel(End::Source, at) => self.source.step_channel(at),
            Actor::Channel(End::Target, at) => self.target.step_channel(at),
            Actor::Question(at) => self.questions[at].step(now),
            Actor::SourceAsks => self.source.step_question(now),
            Actor::Look => self.target.step_look(),
            Actor::Listener => self.target.step_listener(now),
            Actor::Caller(at) => self.target.step_caller(at, now),
            Actor::Pipe(wire, end) => self.net().deliver(wire, end),
            Actor::Watchdog => self.source_vm().watch(now),
        }
    }

    fn sleeps(&self, actor: Actor) -> bool {
        let end = match actor {
            Actor::Main(end) | Actor::Reader(end) | Actor::Beat(end) | Actor::Channel(end, _) => end,
            Actor::SourceAsks => End::Source,
            Actor::Look | Actor::Listener | Actor::Caller(_) => End::Target,
            Actor::Guest(_) | Actor::Question(_) | Actor::Pipe(..) | Actor::Watchdog => return false,
        };
        let frozen = matches!(actor, Actor::Main(_)) && self.now < self.frozen_until[end as usize];
        frozen || self.now < self.suspended_until[end as usize]
    }

    fn run_guest(&mut self, end: End) {
        match end {
            End::Source => {
                let guest = self.source_vm().guest.clone();
                guest.lock().expect("no holder panics").act();
            }
            End::Target => {
                if let Some(guest) = &mut self.target_vm().guest {
                    guest.act();
                }
            }
        }
    }

    fn wake_all(&mut self) {
        let mut awake = std::mem::take(&mut self.awake);
        awake.clear();
        for end in [End::Source, End::Target] {
            awake.extend([Actor::Guest(end), Actor::Main(end), Actor::Reader(end), Actor::Beat(end)]);
        }
        awake.extend([Actor::SourceAsks, Actor::Look, Actor::Listener, Actor::Watchdog]);
        awake.extend((0..self.source.channels()).map(|at| Actor::Channel(End::Source, at)));
        awake.extend((0..self.target.channels()).map(|at| Actor::Channel(End::Target, at)));
        awake.extend((0..self.target.callers()).map(Actor::Caller));
        awake.extend((0..self.questions.len()).map(Actor::Question));
        awake.extend(self.net().loaded().map(|(wire, end)| Actor::Pipe(wire, end)));
        self.awake = awake;
    }

    fn pass_time(&mut self) {
        let most = self.plan.pace.as_nanos() as u64;
        self.now += Duration::from_nanos(self.random.u64(..=most));
        self.net().tick(self.now);
    }

    /// Nobody has anything to do: time goes on.
    fn wait(&mut self) {
        let questions = self.questions.iter().filter_map(Question::next_at).min();
        let next = [
            self.source.next_at(),
            self.target.next_at(),
            self.net().next_at(),
            self.source_vm().watchdog.fires_at,
            questions,
        ];
        let asleep = self.frozen_until.into_iter().chain(self.suspended_until);
        let next = next.into_iter().flatten().chain(asleep).filter(|&at| at > self.now).min();
        self.now = next.unwrap_or(self.now + IDLE);
        self.net().tick(self.now);
        self.wake_all();
    }

    /// Does what the kernel does for a process that has died.
    fn bury(&mut self) {
        if self.source.is_killed() && !std::mem::replace(&mut self.buried[0], true) {
            self.log().line("source: killed".into());
            self.source.kill();
            let now = self.now;
            self.source_vm().whimbrel_died(now);
            self.wake_all();
        }
        if self.target.is_killed() && !std::mem::replace(&mut self.buried[1], true) {
            self.log().line("target: killed".into());
            self.target.kill();
            self.wake_all();
        }
    }

    fn note_moments(&self) {
        let stopped = self.source.phase() == Some(Phase::Device) && !self.source_vm().runs();
        let mut log = self.log();
        for (moment, has_come) in [
            (Moment::Stopped, stopped),
            (Moment::SourceOver, self.source.is_over()),
            (Moment::TargetOver, self.target.outcome().is_some() || self.target.is_killed()),
        ] {
            if has_come {
                log.note(moment);
            }
        }
    }

    /// Whether nothing will happen any more that matters.
    fn is_quiet(&self) -> bool {
        let asked = self.questions.iter().all(|question| question.answer().is_some());
        let Watchdog { fires_at, .. } = self.source_vm().watchdog;
        let over_at = self.log().time_of(Moment::SourceOver);
        let lingers = self.target.lingers() && over_at.is_some_and(|at| self.now > at + LINGERS);
        let ends = self.source.is_over() && (self.target.is_settled() || lingers);
        ends && asked && fires_at.is_none() && self.target.callers() == 0 && self.net().is_quiet()
    }

    fn net(&self) -> MutexGuard<'_, Net> {
        self.net.lock().expect("no holder panics")
    }
}

fn source_vm(plan: &Plan, random: &mut fastrand::Rng) -> (Shared<SourceMachine>, Arc<Memory>) {
    let backings = plan.blocks.iter().map(|block| block.source).collect();
    let sabotage = plan.sabotage.filter(|sabotage| *sabotage == Sabotage::HolesAreRead);
    let memory = Arc::new(Memory::new(plan.layout(), backings, sabotage));
    let mut guest = Guest::new(memory.clone(), plan.habits, random.fork());
    guest.set_running(plan.was_running);
    let guest = shared(guest);
    let busy = Arc::downgrade(&guest);
    memory.set_meanwhile(move || {
        if let Some(guest) = busy.upgrade()
            && let Ok(mut guest) = guest.try_lock()
        {
            guest.act_now_and_then();
        }
    });
    let machine = SourceMachine {
        guest,
        memory: memory.clone(),
        was_running: plan.was_running,
        watchdog: Watchdog::default(),
        retired: false,
        failing: vec![],
        failed: vec![],
        sabotage: plan.sabotage,
        random: random.fork(),
    };
    (shared(machine), memory)
}

/// A VM that waits, with firmware and leftovers in its RAM.
fn target_vm(plan: &Plan, random: &mut fastrand::Rng) -> (Shared<TargetMachine>, Arc<Memory>) {
    let backings = plan.blocks.iter().map(|block| block.target).collect();
    let sabotage = plan.sabotage.filter(|sabotage| *sabotage != Sabotage::HolesAreRead);
    let memory = Arc::new(Memory::new(plan.layout(), backings, sabotage));
    for slot in 0..memory.slots() {
        match random.u8(..8) {
            0 => memory.write(slot, &[0xee; PAGE]),
            1 => memory.write(slot, &[0; PAGE]),
            _ => {}
        }
    }
    memory.remember();
    let machine = TargetMachine {
        memory: memory.clone(),
        habits: plan.habits,
        guest: None,
        was_running: plan.was_running,
        started: false,
        ended: false,
        record: TargetState::Unknown,
        failing: vec![],
        sabotage: plan.sabotage,
        random: random.fork(),
    };
    (shared(machine), memory)
}

/// A run without harm takes a few thousand steps, one with every time limit in it some ten thousand.
const STEPS_MAX: u64 = 400_000;
const TIME_MAX: Duration = Duration::from_secs(600);

/// How far time goes on when nobody waits for anything.
const IDLE: Duration = Duration::from_millis(50);

/// A target that runs the guest and has heard nothing for so long will hear nothing any more.
const LINGERS: Duration = Duration::from_secs(20);

/// After somebody has started the guest at the source, nothing may start it at the target.
const AFTERMATH_STEPS: u64 = 300;
