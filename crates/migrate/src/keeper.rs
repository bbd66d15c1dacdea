//! The target's main actor: keeps what arrives, and keeps the guest paused until *commit*.
//!
//! Invariant: once an answer "never committed" was promised (`fenced`), a commit that comes late is not taken.

use crate::collector::{Clock, Post};
use crate::vm::TargetRam;
use crate::{Counters, Gate, Inbox, Landing, Note, StartError, Status, TargetVm, Trouble, digest, told};
use engine::{Target, TargetAction, TargetEvent, TargetOutcome, TargetPhase};
use ram::Layout;
use scan::Kernel;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use wire::{Accept, Hash, Hello, Message, TargetState};

/// What a keeper is made of.
pub struct KeeperParts {
    /// The VM that waits.
    pub vm: Box<dyn TargetVm>,
    /// Its RAM.
    pub ram: Arc<dyn TargetRam>,
    /// Its blocks.
    pub layout: Arc<Layout>,
    /// What the source proposed.
    pub hello: Hello,
    /// What this end answers.
    pub accept: Accept,
    /// Where channels wait for each other.
    pub gate: Arc<Gate>,
    /// Which pages hold data.
    pub landing: Arc<Landing>,
    /// What the landers have done.
    pub counters: Arc<Counters>,
    /// For digests.
    pub kernel: Kernel,
    /// Notes of the other threads.
    pub inbox: Arc<Inbox<Note>>,
    /// Writes to the source.
    pub post: Post,
    /// The same time as `step` is told.
    pub clock: Clock,
    /// Shown to people and machines.
    pub status: Arc<Mutex<Status>>,
}

/// What the loop around a keeper does next.
#[derive(Debug)]
pub enum TargetStep {
    /// Step again at once.
    Again,
    /// Step again when there is a note, or after this time.
    Wait(Duration),
    /// It is over.
    Ended(TargetOutcome),
}

/// The target's main actor.
pub struct Keeper {
    parts: KeeperParts,
    engine: Target,
    action: TargetAction,
    heard: Heard,
    device: Vec<u8>,
    /// What was said since the action at hand began.
    said: bool,
    load_time: Duration,
    began_at: Duration,
    cleared_pages: u64,
}

/// What the source has said so far, and who asks.
#[derive(Debug, Default)]
struct Heard {
    at: Duration,
    finish: Option<u64>,
    hashes: Option<Vec<(String, Hash)>>,
    device: Option<Vec<u8>>,
    committed: bool,
    /// A commit came before this end was ready; there may be somebody who relies on it.
    committed_early: bool,
    confirmed: bool,
    fenced: bool,
    /// The operator wants it to end.
    cancelled: bool,
    /// The source has said that it keeps the guest.
    source_owns: bool,
    asking: Vec<Sender<TargetState>>,
    trouble: Option<String>,
    channel_trouble: Option<String>,
}

impl Keeper {
    /// A migration whose hello was found good.
    pub fn new(parts: KeeperParts, now: Duration) -> Self {
        let mut engine = Target::default();
        let action = engine.on(TargetEvent::Greeted);
        let heard = Heard { at: now, ..Heard::default() };
        Self {
            parts,
            engine,
            action,
            heard,
            device: Vec::new(),
            said: false,
            load_time: Duration::ZERO,
            began_at: now,
            cleared_pages: 0,
        }
    }

    /// Does the next thing, if it can be done at `now`.
    pub fn step(&mut self, now: Duration) -> TargetStep {
        self.read_notes(now);
        let event = self.commit().or_else(|| self.interruption(now)).or_else(|| self.perform());
        self.report(now);
        let Some(event) = event else { return TargetStep::Wait(IDLE) };
        self.action = self.engine.on(event);
        self.said = false;
        let TargetAction::End(outcome) = self.action.clone() else { return TargetStep::Again };
        self.answer_all(match &outcome {
            TargetOutcome::Running => TargetState::Running,
            TargetOutcome::Dropped(_) => TargetState::NeverCommitted,
            TargetOutcome::InDoubt(_) => TargetState::Committed,
        });
        TargetStep::Ended(outcome)
    }

    /// What to answer from now on, where somebody may still ask: where the source may have written *commit* and has
    /// not heard how it ended.
    pub fn last_word(&self, outcome: &TargetOutcome) -> Option<TargetState> {
        match outcome {
            TargetOutcome::Running => None,
            TargetOutcome::InDoubt(_) => Some(TargetState::Committed),
            TargetOutcome::Dropped(_) => {
                (self.may_be_committed() && !self.heard.source_owns).then_some(TargetState::NeverCommitted)
            }
        }
    }

    /// Whether the source may have written *commit*.
    fn may_be_committed(&self) -> bool {
        let was_ready = self.load_time > Duration::ZERO;
        was_ready || self.heard.committed_early
    }

    /// Where it stands.
    pub fn phase(&self) -> TargetPhase {
        self.engine.phase()
    }

    /// The VM, when it is over.
    pub fn into_vm(self) -> Box<dyn TargetVm> {
        self.parts.vm
    }

    /// Pages that held data at the start and are holes at the source.
    pub fn cleared_pages(&self) -> u64 {
        self.cleared_pages
    }

    fn read_notes(&mut self, now: Duration) {
        let committed = matches!(self.engine.phase(), TargetPhase::Committed | TargetPhase::Running);
        while let Some(note) = self.parts.inbox.take() {
            match note {
                Note::Message(message) => {
                    self.heard.at = now;
                    self.heard.message(message, &self.action, self.said);
                }
                Note::ChannelFailed { channel, reason } => {
                    self.heard.channel_trouble.get_or_insert(format!("channel {channel}: {reason}"));
                }
                Note::Lost(reason) => self.heard.fail(format!("the connection to the source: {reason}")),
                Note::Cancel => {
                    self.heard.cancelled = true;
                    self.heard.fail("ended by the operator".into());
                }
                Note::Asked(reply) => self.heard.asked(reply, committed),
                Note::Wake => {}
            }
        }
        if self.engine.phase() == TargetPhase::Running {
            self.answer_all(TargetState::Running);
        }
    }

    /// A commit counts even when the connection broke right behind it, unless it comes too late.
    fn commit(&self) -> Option<TargetEvent> {
        let awaited = self.action == TargetAction::AwaitCommit && self.said;
        (awaited && self.heard.committed && !self.heard.fenced).then_some(TargetEvent::Committed)
    }

    fn interruption(&mut self, now: Duration) -> Option<TargetEvent> {
        match self.action {
            TargetAction::Receive => {
                let channel_trouble = self.heard.channel_trouble.take();
                channel_trouble.into_iter().for_each(|reason| self.heard.fail(reason));
            }
            TargetAction::Settle
            | TargetAction::Verify
            | TargetAction::AwaitDevice
            | TargetAction::Load
            | TargetAction::AwaitCommit => {}
            // Whatever broke meanwhile, the source is to hear that the guest runs.
            TargetAction::AwaitConfirmed if self.heard.confirmed || !self.said => return None,
            TargetAction::AwaitConfirmed => {}
            _ => return None,
        }
        let silence = now.saturating_sub(self.heard.at);
        if silence > SILENCE_MAX {
            self.heard.fail(format!("nothing heard from the source for {:.1} s", silence.as_secs_f64()));
        }
        self.heard.trouble.clone().map(TargetEvent::Failed)
    }

    fn perform(&mut self) -> Option<TargetEvent> {
        let done = match self.action.clone() {
            TargetAction::Receive => self.receive(),
            TargetAction::Settle => self.settle().map(Some),
            TargetAction::Verify => self.verify(),
            TargetAction::AwaitDevice => Ok(self.await_device()),
            TargetAction::Load => self.load().map(Some),
            TargetAction::AwaitCommit => {
                let load_ms = self.load_time.as_millis() as u64;
                self.say(&Message::Ready { load_ms }).map(|()| None)
            }
            TargetAction::Record => self.parts.vm.record_commit().map(|()| Some(TargetEvent::Recorded)),
            TargetAction::Start => Ok(Some(self.start())),
            TargetAction::AwaitConfirmed => {
                self.say(&Message::Running).map(|()| self.heard.confirmed.then_some(TargetEvent::Confirmed))
            }
            // The record on disk answers as well, so an operator need not wait.
            TargetAction::Linger => {
                Ok((self.heard.confirmed || self.heard.cancelled).then_some(TargetEvent::Confirmed))
            }
            TargetAction::Relinquish => self.relinquish().map(Some),
            TargetAction::Drop { quit } => self.drop_vm(quit).map(Some),
            TargetAction::End(_) => unreachable!("the end is not performed"),
        };
        done.unwrap_or_else(|error| {
            self.heard.fail(told(&*error)); // The source is told why.
            self.heard.trouble.clone().map(TargetEvent::Failed)
        })
    }

    fn receive(&mut self) -> Result<Option<TargetEvent>, Trouble> {
        self.say(&Message::Accept(self.parts.accept.clone()))?;
        let all_in = self.heard.finish.is_some_and(|sync| self.parts.gate.is_open(sync));
        Ok(all_in.then_some(TargetEvent::AllIn))
    }

    fn settle(&mut self) -> Result<TargetEvent, Trouble> {
        self.cleared_pages = self.parts.landing.settle(&*self.parts.ram)?;
        Ok(TargetEvent::Settled)
    }

    fn verify(&mut self) -> Result<Option<TargetEvent>, Trouble> {
        if !self.parts.hello.verify {
            return Ok(Some(TargetEvent::Verified));
        }
        let Some(source) = self.heard.hashes.take() else { return Ok(None) };
        let target = digest(&*self.parts.ram, &self.parts.layout, &self.parts.kernel, DIGEST_THREADS)?;
        compare(&source, &target)?;
        self.post(&Message::Verified { pages: self.parts.layout.pages() })?;
        Ok(Some(TargetEvent::Verified))
    }

    fn await_device(&mut self) -> Option<TargetEvent> {
        self.device = self.heard.device.take()?;
        Some(TargetEvent::DeviceArrived)
    }

    fn load(&mut self) -> Result<TargetEvent, Trouble> {
        let began = (self.parts.clock)();
        self.parts.vm.load(&self.device)?;
        self.load_time = (self.parts.clock)().saturating_sub(began).max(Duration::from_nanos(1));
        Ok(TargetEvent::Loaded)
    }

    fn start(&mut self) -> TargetEvent {
        match self.parts.vm.start() {
            Ok(()) => TargetEvent::Started,
            Err(StartError::Refused(error)) => TargetEvent::NotStarted(told(&*error)),
            Err(StartError::Unsure(error)) => TargetEvent::StartUnsure(told(&*error)),
        }
    }

    fn relinquish(&mut self) -> Result<TargetEvent, Trouble> {
        self.parts.vm.end()?;
        self.say_never();
        Ok(TargetEvent::Relinquished)
    }

    /// For a source that has written *commit*, or is about to.
    fn say_never(&mut self) {
        let (session, state) = (self.parts.hello.session, TargetState::NeverCommitted);
        // If nobody hears it, the source asks.
        let _ = self.post(&Message::Answer { session, state });
    }

    fn drop_vm(&mut self, quit: bool) -> Result<TargetEvent, Trouble> {
        let reason = self.heard.trouble.clone().unwrap_or_default();
        let _ = self.post(&Message::Failed { reason });
        if quit {
            self.parts.vm.end()?;
        }
        if self.may_be_committed() {
            self.say_never();
        }
        Ok(TargetEvent::Dropped)
    }

    /// Says it once for the action at hand.
    fn say(&mut self, message: &Message) -> Result<(), Trouble> {
        if !std::mem::replace(&mut self.said, true) {
            self.post(message)?;
        }
        Ok(())
    }

    fn post(&mut self, message: &Message) -> Result<(), Trouble> {
        (self.parts.post)(message)
    }

    fn answer_all(&mut self, state: TargetState) {
        for reply in self.heard.asking.drain(..) {
            // Whoever asked and left needs no answer.
            let _ = reply.send(state);
        }
    }

    fn report(&mut self, now: Duration) {
        let counters = &self.parts.counters;
        let mut status = self.parts.status.lock().expect("no holder panics");
        status.status = phase_name(self.engine.phase()).into();
        status.total_time = (now - self.began_at).as_millis() as u64;
        status.ram.transferred = counters.transferred.load(Relaxed);
        status.ram.normal = counters.normal.load(Relaxed);
        status.ram.duplicate = counters.duplicate.load(Relaxed);
    }
}

impl Heard {
    /// A word counts only when it is due and once: a commit that comes early is none later. `said`: what there is
    /// to say at `action` was said.
    fn message(&mut self, message: Message, action: &TargetAction, said: bool) {
        use TargetAction::{AwaitCommit, AwaitConfirmed, AwaitDevice, Linger, Receive, Settle, Verify};
        let receives = matches!(action, Receive | Settle | Verify | AwaitDevice);
        let finished = receives && self.finish.is_some();
        match message {
            Message::Finish { sync } if receives && self.finish.is_none() => self.finish = Some(sync),
            Message::Hashes { blocks } if finished && self.hashes.is_none() => self.hashes = Some(blocks),
            Message::Device(state) if finished && self.device.is_none() => self.device = Some(state),
            Message::Commit if *action == AwaitCommit && said => self.committed = true,
            Message::Commit if !self.committed => {
                self.committed_early = true;
                self.fail("the source committed before this end was ready".into());
            }
            Message::Confirmed if matches!(action, AwaitConfirmed | Linger) => self.confirmed = true,
            Message::Failed { reason } => {
                self.source_owns = true;
                self.fail(format!("the source gave up: {reason}"));
            }
            Message::Cancel => {
                self.source_owns = true;
                self.fail("the source's operator ended it".into());
            }
            Message::Alive => {}
            other => self.fail(format!("the source sent a message of kind {} out of turn", other.kind())),
        }
    }

    /// Somebody at the source asks about the commit. Before one came, the answer will be that none counts.
    fn asked(&mut self, reply: Sender<TargetState>, committed: bool) {
        self.asking.push(reply);
        if !committed && !self.committed {
            self.fenced = true;
            self.fail("the source has lost the connection and asks who owns the guest".into());
        }
    }

    fn fail(&mut self, reason: String) {
        self.trouble.get_or_insert(reason);
    }
}

fn compare(source: &[(String, Hash)], target: &[(String, Hash)]) -> Result<(), Trouble> {
    let differs = |(name, hash): &&(String, Hash)| {
        source.iter().find(|(other, _)| other == name).is_none_or(|(_, other)| other != hash)
    };
    let names: Vec<&str> = target.iter().filter(differs).map(|(name, _)| name.as_str()).collect();
    match names.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "RAM differs after the last page, in {}: the guest is not handed over",
            names.join(", ")
        )
        .into()),
    }
}

fn phase_name(phase: TargetPhase) -> &'static str {
    match phase {
        TargetPhase::Setup => "setup",
        TargetPhase::Active => "active",
        TargetPhase::Device | TargetPhase::Committed => "device",
        TargetPhase::Running | TargetPhase::Ended => "completed",
    }
}

/// The longest time between two looks at the clock while nothing comes.
const IDLE: Duration = Duration::from_millis(50);

/// The source says that it is alive several times a second.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Both ends wait for the digests and have nothing else to do.
const DIGEST_THREADS: usize = 4;
