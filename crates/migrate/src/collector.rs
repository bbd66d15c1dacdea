//! The source's main actor: does what the engine decides, and hears what goes wrong meanwhile.
//!
//! Invariants: a page that was collected is pending until a round with it is published, and a round that is not
//! flushed fails the migration, so no page is forgotten. What plain scans may have missed (`hidden`) becomes
//! pending again behind every scan that no direct I/O crosses.

use crate::sorter::Sorter;
use crate::status::Gauge;
use crate::{Attached, CommitError, Counters, Feed, Inbox, Note, SourceVm, Status, Trouble, digest, told};
use dirty::{Changes, DirtyError};
use engine::{Action, Event, Failure, Limits, Outcome, Owner, Phase, Source};
use ram::{PAGE, PageSets, Reach};
use scan::Kernel;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use wire::{Hello, Message, Session, TargetState};

/// Writes a control message.
pub type Post = Box<dyn FnMut(&Message) -> Result<(), Trouble> + Send>;

/// Has the VM send *commit* on the line to the target.
pub type Commit = Box<dyn FnMut(&mut dyn SourceVm) -> Result<(), CommitError> + Send>;

/// Asks the target on a connection of its own what became of the migration. None while there is no answer: it is
/// to be called again.
pub type Asker = Box<dyn FnMut(Session) -> Option<Result<TargetState, Trouble>> + Send>;

/// The time since the start, for what is waited for within a step.
pub type Clock = Box<dyn Fn() -> Duration + Send>;

/// What a collector is made of.
pub struct CollectorParts {
    /// The VM.
    pub vm: Box<dyn SourceVm>,
    /// The source's proposal.
    pub hello: Hello,
    /// What the decisions keep to.
    pub limits: Limits,
    /// Gives pages to the senders.
    pub feed: Arc<Feed>,
    /// What the senders have done.
    pub counters: Arc<Counters>,
    /// Looks for zero pages where the main thread does, and for digests.
    pub kernel: Kernel,
    /// Notes of the other threads.
    pub inbox: Arc<Inbox<Note>>,
    /// Is given the RAM when the VM is attached, for the senders.
    pub reach: Arc<OnceLock<Arc<dyn Reach>>>,
    /// Writes to the target.
    pub post: Post,
    /// Has the VM send *commit*.
    pub commit: Commit,
    /// Asks the target anew.
    pub asker: Asker,
    /// The same time as `step` is told.
    pub clock: Clock,
    /// Shown to people and machines.
    pub status: Arc<Mutex<Status>>,
}

/// What the loop around a collector does next.
#[derive(Debug)]
pub enum Step {
    /// Step again at once.
    Again,
    /// Step again when there is a note, or after this time.
    Wait(Duration),
    /// It is over.
    Ended(Outcome),
}

/// The source's main actor.
pub struct Collector {
    parts: CollectorParts,
    engine: Source,
    action: Action,
    attached: Option<Attached>,
    pending: Changes,
    fresh: Changes,
    /// Pages that plain scans reported since the last quiesced one.
    hidden: PageSets,
    /// Pages that the target holds as data.
    sent: PageSets,
    device: Vec<u8>,
    heard: Heard,
    greeted_at: Option<Duration>,
    stopped_at: Duration,
    collected_at: Duration,
    /// When something last got on: a step was done, bytes went out, or the target said more than that it lives.
    moved_at: Duration,
    sent_bytes: u64,
    normal_before: u64,
    sorter: Sorter,
    gauge: Gauge,
}

/// What the other end has said so far.
#[derive(Debug, Default)]
struct Heard {
    at: Duration,
    accepted: bool,
    ready: bool,
    running: bool,
    never_runs: bool,
    verified: bool,
    cancel: bool,
    trouble: Option<Failure>,
}

impl Collector {
    /// A migration that has not begun.
    pub fn new(parts: CollectorParts) -> Self {
        let layout = &parts.hello.layout;
        let empty = || PageSets::new(layout);
        let engine = Source::new(parts.limits);
        Self {
            action: engine.start(),
            engine,
            attached: None,
            pending: Changes::new(layout),
            fresh: Changes::new(layout),
            hidden: empty(),
            sent: empty(),
            device: Vec::new(),
            heard: Heard::default(),
            greeted_at: None,
            stopped_at: Duration::ZERO,
            collected_at: Duration::ZERO,
            moved_at: Duration::ZERO,
            sent_bytes: 0,
            normal_before: 0,
            sorter: Sorter::new(parts.kernel, parts.feed.packet_pages()),
            gauge: Gauge::default(),
            parts,
        }
    }

    /// Learns how long a message takes to the target and back, for the forecast.
    pub fn learn_round_trip(&mut self, took: Duration) {
        self.engine.forecast().learn_round_trip(took);
    }

    /// Does the next thing, if it can be done at `now`, the time since the start.
    pub fn step(&mut self, now: Duration) -> Step {
        self.read_notes(now);
        let event = self.interruption(now).or_else(|| self.perform(now));
        self.report(now);
        let Some(event) = event else { return self.idle() };
        self.action = self.engine.on(event, now);
        self.moved_at = now;
        if let Action::End(outcome) = self.action.clone() {
            self.attached = None;
            self.say_farewell(&outcome);
            self.report(now);
            return Step::Ended(outcome);
        }
        Step::Again
    }

    /// Where it stands.
    pub fn phase(&self) -> Phase {
        self.engine.phase()
    }

    /// The VM, when it is over.
    pub fn into_vm(self) -> Box<dyn SourceVm> {
        self.parts.vm
    }

    fn idle(&self) -> Step {
        Step::Wait(IDLE)
    }

    fn read_notes(&mut self, now: Duration) {
        while let Some(note) = self.parts.inbox.take() {
            match note {
                Note::Message(message) => {
                    self.heard.at = now;
                    self.heard.message(message, &self.action, &self.parts.hello);
                }
                Note::ChannelFailed { channel, reason } => {
                    self.heard.fail(format!("channel {channel}: {reason}"));
                }
                Note::Lost(reason) => self.heard.fail(format!("the connection to the target: {reason}")),
                Note::Cancel => self.heard.cancel = true,
                Note::Asked(_) | Note::Wake => {}
            }
        }
    }

    /// What ends the action at hand from outside, where it may be ended.
    fn interruption(&mut self, now: Duration) -> Option<Event> {
        let before_commit = match self.action {
            // What the target said counts, whatever broke behind it.
            Action::AwaitRunning if self.heard.running || self.heard.never_runs => return None,
            Action::AwaitRunning => false,
            Action::Ask | Action::Retire | Action::Resume | Action::End(_) => return None,
            _ => true,
        };
        if before_commit && self.heard.cancel {
            return Some(Event::Cancelled);
        }
        let silence = now.saturating_sub(self.heard.at);
        let silence_max = match self.engine.phase() {
            Phase::Device | Phase::Committed => SILENCE_STOPPED_MAX,
            _ => SILENCE_MAX,
        };
        if silence > silence_max && self.greeted_at.is_some() {
            self.heard.fail(format!("nothing heard from the target for {:.1} s", silence.as_secs_f64()));
        }
        self.look_for_progress(now);
        self.heard.trouble.clone().map(Event::Failed)
    }

    /// A guest that stands still must not wait for ever for a target that lives and does nothing, or for a channel
    /// that broke behind its last byte.
    fn look_for_progress(&mut self, now: Duration) {
        let sent_bytes = self.parts.counters.transferred.load(Relaxed);
        if std::mem::replace(&mut self.sent_bytes, sent_bytes) != sent_bytes || self.heard.verified {
            self.heard.verified = false;
            self.moved_at = now;
        }
        let hello = &self.parts.hello;
        let digest_pages = if hello.verify { hello.layout.pages() } else { 0 };
        let stalled = now.saturating_sub(self.moved_at);
        let stands_still = matches!(self.engine.phase(), Phase::Device | Phase::Committed);
        if stands_still && stalled > STALLED_MAX + DIGEST_TIME_MAX.mul_f64(digest_pages as f64) {
            let seconds = stalled.as_secs_f64();
            self.heard.fail(format!("the target lives, but nothing has got on for {seconds:.1} s"));
        }
    }

    /// Does the action at hand; none if it is not done yet.
    fn perform(&mut self, now: Duration) -> Option<Event> {
        let done = match self.action.clone() {
            Action::Greet => return self.greet(now),
            Action::Flush => return self.flush(),
            Action::AwaitReady => return self.heard.ready.then_some(Event::Ready),
            Action::AwaitRunning => return self.await_running(),
            Action::Ask => return self.await_running().or_else(|| self.ask()),
            Action::Arm { quiesced } => self.arm(quiesced),
            Action::Collect { quiesced } => self.collect(quiesced, now),
            Action::Publish => Ok(self.publish()),
            Action::Stop => self.stop(now),
            Action::Save => self.save(),
            Action::Finish => self.finish(),
            Action::Commit => Ok(self.commit()),
            Action::Retire => Ok(self.retire(now)),
            Action::Resume => Ok(self.resume()),
            Action::End(_) => unreachable!("the end is not performed"),
        };
        let failed = match self.action {
            Action::Arm { quiesced: true } | Action::Collect { quiesced: true } => Event::FailedQuiesced,
            _ => Event::Failed,
        };
        Some(done.unwrap_or_else(|error| failed(Failure::Here(told(&*error)))))
    }

    fn greet(&mut self, now: Duration) -> Option<Event> {
        if self.greeted_at.is_none() {
            self.greeted_at = Some(now);
            self.heard.at = now;
            let hello = Message::Hello(self.parts.hello.clone());
            let failed = |error: Trouble| Event::Failed(Failure::Peer(told(&*error)));
            return self.post(&hello).err().map(failed);
        }
        self.heard.accepted.then_some(Event::Accepted)
    }

    fn arm(&mut self, quiesced: bool) -> Result<Event, Trouble> {
        let attached = self.parts.vm.attach(quiesced, &mut self.pending.data)?;
        self.parts.reach.get_or_init(|| attached.ram.clone());
        self.attached = Some(attached);
        let pages = self.pending.data.len();
        self.status().whimbrel.holes_skipped = self.parts.hello.layout.pages() - pages;
        Ok(Event::Armed { pages })
    }

    fn collect(&mut self, quiesced: bool, now: Duration) -> Result<Event, Trouble> {
        let stopped = self.engine.phase() == Phase::Device;
        if quiesced {
            let began = (self.parts.clock)();
            self.parts.vm.stop()?;
            self.engine.forecast().learn_stop((self.parts.clock)().saturating_sub(began));
        }
        let collected = self.collect_changes(stopped);
        if quiesced {
            self.parts.vm.resume()?;
        }
        let written = collected?;
        if stopped || quiesced {
            self.pending.add_data(&self.hidden);
            self.hidden.clear();
        }
        if !stopped {
            self.note_rate(written, now);
        }
        Ok(Event::Collected { pages: self.pending.len() })
    }

    /// Pages that were written or discarded since the last time, now pending.
    fn collect_changes(&mut self, stopped: bool) -> Result<u64, DirtyError> {
        let tracker = &mut self.attached.as_mut().expect("attached before the first round").tracker;
        self.fresh.clear();
        tracker.collect(&mut self.fresh)?;
        if stopped {
            tracker.reconcile(&self.sent, &mut self.fresh)?;
        }
        if self.parts.limits.direct_io {
            self.hidden.union(&self.fresh.data);
            self.hidden.subtract(&self.fresh.gone);
        }
        self.pending.merge(&self.fresh);
        Ok(self.fresh.len())
    }

    fn publish(&mut self) -> Event {
        self.status().whimbrel.discarded += self.pending.gone.len();
        self.sent.union(&self.pending.data);
        self.sent.subtract(&self.pending.gone);
        self.normal_before = self.parts.counters.normal_pages();
        self.parts.feed.publish(&mut self.pending);
        Event::Published
    }

    fn flush(&mut self) -> Option<Event> {
        let ram = &self.attached.as_ref().expect("attached before the first round").ram;
        if let Err(error) = self.sorter.step(&self.parts.feed, &**ram) {
            return Some(Event::Failed(Failure::Here(told(&*error))));
        }
        let pages = self.parts.counters.normal_pages() - self.normal_before;
        self.parts.feed.is_flushed().then_some(Event::Flushed { pages })
    }

    fn stop(&mut self, now: Duration) -> Result<Event, Trouble> {
        self.stopped_at = now;
        let predicted = self.engine.expected_downtime().total().as_millis() as u64;
        self.status().whimbrel.predicted_downtime = Some(predicted);
        self.parts.vm.stop().map(|()| Event::Stopped)
    }

    fn save(&mut self) -> Result<Event, Trouble> {
        self.device = self.parts.vm.save()?;
        self.status().whimbrel.device_bytes = self.device.len() as u64;
        Ok(Event::Saved)
    }

    fn finish(&mut self) -> Result<Event, Trouble> {
        self.post(&Message::Finish { sync: self.parts.feed.syncs() })?;
        if self.parts.hello.verify {
            let ram = self.attached.as_ref().expect("attached before the first round").ram.clone();
            let blocks = digest(&*ram, &self.parts.hello.layout, &self.parts.kernel, DIGEST_THREADS)?;
            self.post(&Message::Hashes { blocks })?;
        }
        let device = Message::Device(std::mem::take(&mut self.device));
        self.post(&device)?;
        Ok(Event::Finished)
    }

    fn commit(&mut self) -> Event {
        match (self.parts.commit)(&mut *self.parts.vm) {
            Ok(()) => Event::Committed,
            Err(CommitError::Unsure(error)) => Event::CommitUnsure(told(&*error)),
            Err(CommitError::Unsent(error)) => Event::Failed(Failure::Here(told(&*error))),
        }
    }

    fn await_running(&mut self) -> Option<Event> {
        match (self.heard.running, self.heard.never_runs) {
            (true, _) => Some(Event::Running),
            (_, true) => Some(Event::NeverRuns),
            _ => None,
        }
    }

    fn ask(&mut self) -> Option<Event> {
        let failed = |reason| Event::Failed(Failure::Peer(reason));
        Some(match (self.parts.asker)(self.parts.hello.session)? {
            Ok(TargetState::Running) => Event::Running,
            Ok(TargetState::NeverCommitted) => Event::NeverRuns,
            Ok(state) => failed(format!("the target's answer about the commit: {state:?}")),
            Err(error) => failed(told(&*error)),
        })
    }

    /// The guest runs at the target whatever happens here; what fails is only told.
    fn retire(&mut self, now: Duration) -> Event {
        self.status().downtime = Some((now - self.stopped_at).as_millis() as u64);
        // A target that does not hear it stays for those who ask.
        let _ = self.post(&Message::Confirmed);
        self.attached = None;
        if let Err(error) = self.parts.vm.retire() {
            self.status().error_desc = Some(format!("the guest runs at the target; {}", told(&*error)));
        }
        Event::Retired
    }

    fn resume(&mut self) -> Event {
        match self.parts.vm.resume() {
            Ok(()) => Event::Resumed,
            Err(error) => Event::NotResumed(told(&*error)),
        }
    }

    /// Tells the target why it ended here. It may be gone; then there is nobody to tell.
    fn say_farewell(&mut self, outcome: &Outcome) {
        let message = match (&outcome.failure, outcome.cancelled) {
            (_, true) => Message::Cancel,
            (Some(failure), _) => Message::Failed { reason: failure.reason().to_owned() },
            (None, false) => return,
        };
        if outcome.owner == Owner::Source {
            let _ = self.post(&message);
        }
    }

    fn post(&mut self, message: &Message) -> Result<(), Trouble> {
        (self.parts.post)(message)
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.parts.status.lock().expect("no holder panics")
    }

    fn note_rate(&mut self, written: u64, now: Duration) {
        let seconds = (now - self.collected_at).as_secs_f64();
        self.collected_at = now;
        let mut status = self.status();
        status.ram.dirty_sync_count += 1;
        if seconds > 0.0 {
            status.ram.dirty_pages_rate = (written as f64 / seconds) as u64;
        }
    }

    fn report(&mut self, now: Duration) {
        let left_pages = self.parts.feed.left_pages() + self.pending.len();
        let (phase, rounds) = (self.engine.phase(), self.engine.rounds());
        let expected = self.engine.expected_downtime().total();
        let mut status = self.parts.status.lock().expect("no holder panics");
        status.status = phase_name(phase).into();
        status.total_time = now.as_millis() as u64;
        if phase == Phase::Setup {
            status.setup_time = status.total_time;
        }
        status.expected_downtime = expected.as_millis() as u64;
        status.whimbrel.rounds = rounds;
        status.ram.remaining = left_pages * PAGE as u64;
        self.gauge.read(&self.parts.counters, now, &mut status.ram);
    }
}

impl Heard {
    /// A word counts only when it is due: one that comes early decides nothing later.
    fn message(&mut self, message: Message, action: &Action, hello: &Hello) {
        let handed_over = matches!(action, Action::AwaitRunning | Action::Ask);
        let protocols = hello.protocol_min..=hello.protocol_max;
        match message {
            Message::Accept(accept)
                if *action == Action::Greet
                    && accept.session == hello.session
                    && protocols.contains(&accept.protocol) =>
            {
                self.accepted = true;
            }
            Message::Refuse { reason } => self.fail(format!("the target refuses: {reason}")),
            Message::Ready { .. } if *action == Action::AwaitReady => self.ready = true,
            Message::Running if handed_over => self.running = true,
            Message::Answer { session, state: TargetState::NeverCommitted }
                if handed_over && session == hello.session =>
            {
                self.never_runs = true;
            }
            Message::Failed { reason } => self.fail(format!("the target gave up: {reason}")),
            Message::Cancel => self.fail("the target's operator ended it".into()),
            Message::Verified { .. } => self.verified = true,
            Message::Alive | Message::Synced { .. } => {}
            other => self.fail(format!("the target sent a message of kind {} out of turn", other.kind())),
        }
    }

    fn fail(&mut self, reason: String) {
        self.trouble.get_or_insert(Failure::Peer(reason));
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Setup => "setup",
        Phase::Active => "active",
        Phase::Device | Phase::Committed | Phase::Resuming => "device",
        Phase::Ended => "completed",
    }
}

/// The longest time between two looks at the clock while nothing comes.
const IDLE: Duration = Duration::from_millis(50);

/// Each end says that it is alive several times a second. While the guest runs a silent target costs nothing yet;
/// while it is stopped, every moment counts.
const SILENCE_MAX: Duration = Duration::from_secs(10);
const SILENCE_STOPPED_MAX: Duration = Duration::from_secs(3);

/// Above what the target's QEMU may take to load its state, whose end tells more.
const STALLED_MAX: Duration = Duration::from_secs(40);

/// What the digest of a page may take the target: at 1 GB/s, a quarter of what a CPU does.
const DIGEST_TIME_MAX: Duration = Duration::from_micros(4);

/// The guest is stopped and the channels have nothing to do while digests are made.
const DIGEST_THREADS: usize = 4;
