//! The target's whimbrel: the real actors, wired as `migrate::target` wires them, each stepped when it is its turn.

use crate::frames::{PacketEye, has, is_ready};
use crate::log::{Log, Moment};
use crate::memory::Memory;
use crate::net::{Life, Net, Port, WireId};
use crate::plan::Plan;
use crate::source_end::{BEAT, clock, name};
use crate::target_vm::{TargetHandle, TargetMachine};
use crate::{End, Sabotage, Shared, shared};
use channel::{Control, Kind, Transport, classify};
use engine::{TargetOutcome, TargetPhase};
use migrate::{
    Agreement, Desk, Inbox, Keeper, KeeperParts, Landed, Lander, Landing, Note, Post, TargetStep, Trouble,
    told,
};
use scan::Kernel;
use std::cell::Cell;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;
use wire::{CONTROL_GREETING, Hello, Message, OPENING_BYTES, Session, TargetState};

/// A whimbrel that receives a VM.
pub(crate) struct TargetEnd {
    net: Shared<Net>,
    log: Shared<Log>,
    life: Life,
    machine: Shared<TargetMachine>,
    memory: Arc<Memory>,
    inbox: Arc<Inbox<Note>>,
    desk: Desk,
    /// What the RAM holds, as far as somebody has looked.
    landing: Arc<Landing>,
    looks: bool,
    callers: Vec<Caller>,
    line: Option<Line>,
    landers: Vec<Channel>,
    keeper: Option<Keeper>,
    wake_at: Duration,
    outcome: Option<TargetOutcome>,
    /// After the end: until when it stays for those who ask.
    stays_until: Option<Duration>,
    exited: bool,
    eye: PacketEye,
    sabotage: Option<Sabotage>,
}

/// The control connection.
struct Line {
    wire: WireId,
    writer: Shared<Control<Port>>,
    reader: Option<Control<Port>>,
    beats: bool,
    beat_at: Duration,
}

/// A channel's thread.
struct Channel {
    id: u8,
    wire: WireId,
    agreement: Arc<Agreement>,
    lander: Lander<Port>,
    /// The sync point that it waits at.
    waits_at: Option<u64>,
    over: bool,
}

/// Somebody who is being received.
struct Caller {
    wire: WireId,
    stage: Stage,
    leaves_at: Duration,
}

enum Stage {
    /// Nothing is known of him.
    Stranger,
    /// He has greeted and is to say what he wants.
    Greeted,
    /// He asked, and waits.
    Asked(Session, Receiver<TargetState>),
    /// He was answered, and may confirm.
    Answered(Session, TargetState),
    /// He is nobody's business any more.
    Gone,
}

impl TargetEnd {
    /// Listens, as `migrate::target::run` does.
    pub(crate) fn new(
        plan: &Plan,
        net: Shared<Net>,
        log: Shared<Log>,
        life: Life,
        machine: Shared<TargetMachine>,
        memory: Arc<Memory>,
    ) -> Self {
        let inbox = Arc::new(Inbox::default());
        let (disk, session) = (machine.clone(), plan.session());
        let recall = move |asked| match asked == session {
            true => disk.lock().expect("no holder panics").record,
            false => TargetState::Unknown,
        };
        let desk = Desk::new(plan.offer(), inbox.clone(), Box::new(recall));
        let landing = desk.prepare(&*memory, Kernel::best()).expect("the target's RAM can be looked at");
        Self {
            desk,
            landing,
            looks: true,
            net,
            log,
            life,
            machine,
            memory,
            inbox,
            callers: vec![],
            line: None,
            landers: vec![],
            keeper: None,
            wake_at: Duration::ZERO,
            outcome: None,
            stays_until: None,
            exited: false,
            eye: PacketEye::default(),
            sabotage: plan.sabotage,
        }
    }

    /// How it ended, from its own point of view.
    pub(crate) fn outcome(&self) -> Option<&TargetOutcome> {
        self.outcome.as_ref()
    }

    /// Whether it was killed.
    pub(crate) fn is_killed(&self) -> bool {
        self.life.is_over()
    }

    /// Whether it is no more.
    pub(crate) fn is_gone(&self) -> bool {
        self.exited || self.is_killed()
    }

    /// Whether nothing is left for it to do but to be there for those who ask, or to wait for a source.
    pub(crate) fn is_settled(&self) -> bool {
        let idle = self.keeper.is_none() && self.outcome.is_none() && self.callers.is_empty();
        self.is_gone() || idle || self.stays_until.is_some()
    }

    /// Whether it has said that the guest runs and has not heard that the source knows.
    pub(crate) fn lingers(&self) -> bool {
        self.phase() == Some(TargetPhase::Running)
    }

    /// Where it stands, if it has agreed to a migration that is not over.
    pub(crate) fn phase(&self) -> Option<TargetPhase> {
        self.keeper.as_ref().map(Keeper::phase)
    }

    /// Channels that have come.
    pub(crate) fn channels(&self) -> usize {
        self.landers.len()
    }

    /// Callers that are being received.
    pub(crate) fn callers(&self) -> usize {
        self.callers.len()
    }

    /// The operator ends it.
    pub(crate) fn cancel(&self) {
        self.inbox.put(Note::Cancel);
    }

    /// SIGKILL. The kernel closes what was open; nothing else happens.
    pub(crate) fn kill(&mut self) {
        self.life.end();
        self.keeper = None;
        self.close();
    }

    /// The thread that looks at what the RAM holds already: a batch of pages.
    pub(crate) fn step_look(&mut self) -> bool {
        if !self.looks || self.outcome.is_some() || self.is_gone() {
            return false;
        }
        let batches = Cell::new(0);
        let goes_on = || batches.replace(batches.get() + 1) == 0;
        // What this does not come to, or fails at, is looked at where it matters.
        let looked = self.landing.look(&*self.memory, goes_on);
        self.looks = looked.is_ok() && batches.get() > 1;
        true
    }

    /// Accepts a connection.
    pub(crate) fn step_listener(&mut self, now: Duration) -> bool {
        let Some(wire) = self.net().accept() else { return false };
        match self.is_gone() {
            true => self.net().hang_up(wire, End::Target),
            false => {
                self.callers.push(Caller { wire, stage: Stage::Stranger, leaves_at: now + GREETING_MAX })
            }
        }
        true
    }

    /// The thread of a caller.
    pub(crate) fn step_caller(&mut self, at: usize, now: Duration) -> bool {
        let Caller { wire, leaves_at, .. } = self.callers[at];
        let stage = std::mem::replace(&mut self.callers[at].stage, Stage::Gone);
        let (stage, moved) = match stage {
            Stage::Stranger => self.greet(wire, now),
            Stage::Greeted => self.listen(wire, now),
            Stage::Asked(session, answer) => self.answer(wire, session, answer, now >= leaves_at),
            Stage::Answered(session, state) => self.await_confirmation(wire, session, state),
            Stage::Gone => (Stage::Gone, true),
        };
        let late = now >= leaves_at && !matches!(stage, Stage::Gone | Stage::Asked(..));
        if late {
            self.net().hang_up(wire, End::Target);
        }
        if late || matches!(stage, Stage::Gone) {
            self.callers.swap_remove(at);
            return true;
        }
        if matches!(stage, Stage::Asked(..)) && moved {
            self.callers[at].leaves_at = now + ANSWER_MAX;
        }
        self.callers[at].stage = stage;
        moved
    }

    /// The main thread.
    pub(crate) fn step_keeper(&mut self, now: Duration) -> bool {
        if self.stays_until.is_some() {
            return self.stay(now);
        }
        if self.keeper.is_none() && self.outcome.is_none() && !self.is_gone() {
            return self.wait_for_source();
        }
        let Some(keeper) = &mut self.keeper else { return false };
        let step = keeper.step(now);
        if self.life.is_over() {
            return true; // What it decided after its death nobody will ever know.
        }
        match step {
            TargetStep::Again => true,
            TargetStep::Wait(time_max) => {
                self.wake_at = now + time_max;
                false
            }
            TargetStep::Ended(outcome) => {
                self.end(outcome, now);
                true
            }
        }
    }

    /// The thread that reads control messages.
    pub(crate) fn step_reader(&mut self) -> bool {
        let Some(line) = &mut self.line else { return false };
        let Some(reader) = &mut line.reader else { return false };
        if !is_ready(&self.net, line.wire, End::Target) {
            return false;
        }
        match reader.receive() {
            Ok(message) => self.inbox.put(Note::Message(message)),
            Err(error) => {
                self.inbox.put(Note::Lost(told(&error)));
                line.reader = None;
            }
        }
        true
    }

    /// The thread that says that this end is alive.
    pub(crate) fn step_beat(&mut self, now: Duration) -> bool {
        let Some(line) = &mut self.line else { return false };
        if !line.beats || now < line.beat_at {
            return false;
        }
        line.beat_at = now + BEAT;
        line.beats = line.writer.lock().expect("no holder panics").send(&Message::Alive).is_ok();
        true
    }

    /// A channel's thread.
    pub(crate) fn step_channel(&mut self, at: usize) -> bool {
        let over = self.outcome.is_some() || self.is_gone();
        let channel = &mut self.landers[at];
        channel.over |= over;
        if channel.over {
            return false;
        }
        if let Some(sync) = channel.waits_at {
            let opens = channel.agreement.gate.is_open(sync) || self.sabotage == Some(Sabotage::GateIsOpen);
            if opens {
                channel.waits_at = None;
            }
            return opens;
        }
        if !self.eye.sees(&self.net, channel.wire, channel.agreement.format, &channel.agreement.layout) {
            return false;
        }
        if let Err(error) = channel.land(&self.memory, &self.inbox) {
            channel.over = true;
            self.inbox.put(Note::ChannelFailed { channel: channel.id, reason: told(&*error) });
        }
        true
    }

    /// When there is something to do although nothing came.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        if self.is_gone() {
            return None;
        }
        let wake_at = self.keeper.is_some().then_some(self.wake_at);
        let beat_at = self.line.as_ref().filter(|line| line.beats).map(|line| line.beat_at);
        let leaves_at = self.callers.iter().map(|caller| caller.leaves_at).min();
        [wake_at, beat_at, leaves_at, self.stays_until].into_iter().flatten().min()
    }

    fn greet(&mut self, wire: WireId, _now: Duration) -> (Stage, bool) {
        if !has(&self.net, wire, End::Target, 4) {
            return (Stage::Stranger, false);
        }
        let mut first = [0; 4];
        let (arrived, _) = {
            let net = self.net();
            let (bytes, ended) = net.arrived(wire, End::Target);
            first.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            (bytes.len() >= 4, ended)
        };
        let kind = if arrived { classify(first) } else { None };
        let due = match kind {
            Some(Kind::Page) => OPENING_BYTES,
            Some(Kind::Control) => CONTROL_GREETING.len(),
            None => return self.send_away(wire),
        };
        if !has(&self.net, wire, End::Target, due) {
            return (Stage::Stranger, false);
        }
        let mut bytes = vec![0; due];
        if self.port(wire).receive_bytes(&mut bytes).is_err() {
            return self.send_away(wire);
        }
        if kind == Some(Kind::Control) {
            return (Stage::Greeted, true);
        }
        match self.desk.take(&bytes) {
            Some((agreement, id)) => {
                self.start_channel(wire, agreement, id);
                (Stage::Gone, true)
            }
            None => self.send_away(wire),
        }
    }

    fn listen(&mut self, wire: WireId, now: Duration) -> (Stage, bool) {
        if !is_ready(&self.net, wire, End::Target) {
            return (Stage::Greeted, false);
        }
        let mut control = Control::new(self.port(wire));
        match control.receive() {
            Ok(Message::Hello(hello)) => match self.agree(wire, hello, now) {
                Ok(()) => (Stage::Gone, true),
                Err(reason) => {
                    // A source that hung up needs no reason.
                    let _ = control.send(&Message::Refuse { reason });
                    self.send_away(wire)
                }
            },
            Ok(Message::Ask { session }) => {
                self.line(format!("target is asked about {session}"));
                (Stage::Asked(session, self.desk.ask(session)), true)
            }
            _ => self.send_away(wire),
        }
    }

    fn answer(
        &mut self,
        wire: WireId,
        session: Session,
        answer: Receiver<TargetState>,
        late: bool,
    ) -> (Stage, bool) {
        let state = match answer.try_recv() {
            Ok(state) => state,
            Err(TryRecvError::Empty) if !late => return (Stage::Asked(session, answer), false),
            Err(_) => TargetState::Committed,
        };
        self.line(format!("target answers {state:?}"));
        match Control::new(self.port(wire)).send(&Message::Answer { session, state }) {
            Ok(()) => (Stage::Answered(session, state), true),
            Err(_) => self.send_away(wire),
        }
    }

    fn await_confirmation(&mut self, wire: WireId, session: Session, state: TargetState) -> (Stage, bool) {
        if !is_ready(&self.net, wire, End::Target) {
            return (Stage::Answered(session, state), false);
        }
        if matches!(Control::new(self.port(wire)).receive(), Ok(Message::Confirmed)) {
            self.desk.confirm(session, state);
        }
        self.send_away(wire)
    }

    fn send_away(&mut self, wire: WireId) -> (Stage, bool) {
        self.net().hang_up(wire, End::Target);
        (Stage::Gone, true)
    }

    fn agree(&mut self, wire: WireId, hello: Hello, now: Duration) -> Result<(), String> {
        let agreement = self.desk.agree(&hello, &*self.memory)?;
        self.log().note(Moment::Agreed);
        let writer = shared(Control::new(self.port(wire)));
        let reader = Some(Control::new(self.port(wire)));
        let line = Line { wire, writer, reader, beats: true, beat_at: now + BEAT };
        let parts = KeeperParts {
            vm: Box::new(TargetHandle {
                machine: self.machine.clone(),
                life: self.life.clone(),
                log: self.log.clone(),
            }),
            ram: self.memory.clone(),
            layout: agreement.layout.clone(),
            hello,
            accept: agreement.accept.clone(),
            gate: agreement.gate.clone(),
            landing: agreement.landing.clone(),
            counters: agreement.counters.clone(),
            kernel: Kernel::best(),
            inbox: self.inbox.clone(),
            post: self.post(&line),
            clock: clock(&self.log),
            status: Arc::default(),
        };
        self.keeper = Some(Keeper::new(parts, now));
        self.line = Some(line);
        Ok(())
    }

    fn start_channel(&mut self, wire: WireId, agreement: Arc<Agreement>, id: u8) {
        let lander = Lander::new(
            self.port(wire),
            agreement.layout.clone(),
            agreement.format,
            agreement.landing.clone(),
            agreement.counters.clone(),
        );
        self.landers.push(Channel { id, wire, agreement, lander, waits_at: None, over: false });
    }

    /// Before a source has come, only the operator can say anything.
    fn wait_for_source(&mut self) -> bool {
        let Some(note) = self.inbox.take() else { return false };
        if matches!(note, Note::Cancel) {
            self.outcome = Some(TargetOutcome::Dropped("ended by the operator".into()));
            self.exit();
        }
        true
    }

    fn end(&mut self, outcome: TargetOutcome, now: Duration) {
        self.line(format!("target: {outcome:?}"));
        let keeper = self.keeper.take().expect("it just ended");
        let agreement = self.desk.agreement().expect("a keeper has an agreement");
        agreement.gate.tear_down();
        let last_word = keeper.last_word(&outcome);
        self.outcome = Some(outcome);
        match last_word {
            Some(state) => {
                agreement.settle(state);
                self.stays_until = Some(now + QUESTIONS_MAX);
            }
            None => self.exit(),
        }
    }

    /// Stays for those who ask, until one has heard the answer.
    fn stay(&mut self, now: Duration) -> bool {
        let late = self.stays_until.is_some_and(|until| now >= until);
        let note = self.inbox.take();
        use Message::{Cancel, Confirmed, Failed};
        let heard = matches!(note, Some(Note::Message(Confirmed | Cancel | Failed { .. }) | Note::Cancel));
        if late || heard {
            self.stays_until = None;
            self.exit();
        }
        late || note.is_some()
    }

    fn exit(&mut self) {
        self.exited = true;
        self.close();
    }

    fn close(&mut self) {
        let lines = self.line.iter().map(|line| line.wire);
        let landers = self.landers.iter().map(|channel| channel.wire);
        let callers = self.callers.iter().map(|caller| caller.wire);
        let wires: Vec<_> = lines.chain(landers).chain(callers).collect();
        wires.into_iter().for_each(|wire| self.net().hang_up(wire, End::Target));
        self.line = None;
        self.landers.clear();
        self.callers.clear();
    }

    fn post(&self, line: &Line) -> Post {
        let (writer, log) = (line.writer.clone(), self.log.clone());
        Box::new(move |message| {
            writer.lock().expect("no holder panics").send(message)?;
            let mut log = log.lock().expect("no holder panics");
            log.line(format!("target says {}", name(message)));
            match message {
                Message::Ready { .. } => log.note(Moment::Ready),
                Message::Running => log.note(Moment::Told),
                _ => {}
            }
            Ok(())
        })
    }

    fn port(&self, wire: WireId) -> Port {
        Port { net: self.net.clone(), wire, end: End::Target, life: self.life.clone(), live: None }
    }

    fn line(&self, text: String) {
        self.log().line(text);
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().expect("no holder panics")
    }

    fn net(&self) -> MutexGuard<'_, Net> {
        self.net.lock().expect("no holder panics")
    }
}

impl Channel {
    fn land(&mut self, memory: &Memory, inbox: &Inbox<Note>) -> Result<(), Trouble> {
        match self.lander.step(memory)? {
            Landed::Pages => Ok(()),
            Landed::Sync(sync) => {
                self.agreement.gate.reach(self.id, sync);
                inbox.put(Note::Wake);
                self.waits_at = Some(sync);
                Ok(())
            }
            Landed::End => Err("closed by the source".into()),
        }
    }
}

/// As `migrate::target` has them.
const GREETING_MAX: Duration = Duration::from_secs(5);
const ANSWER_MAX: Duration = Duration::from_secs(10);
const QUESTIONS_MAX: Duration = Duration::from_secs(30);
