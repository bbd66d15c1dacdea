//! The source's whimbrel: the real actors, wired as `migrate::source` wires them, each stepped when it is its turn.

use crate::frames::is_ready;
use crate::log::{Log, Moment};
use crate::memory::{Live, Memory};
use crate::net::{Life, Link, Net, Port, WireId};
use crate::plan::Plan;
use crate::question::{ASK_MAX, Question};
use crate::source_vm::SourceHandle;
use crate::{End, Shared, shared};
use channel::{Control, Limiter, Transport};
use engine::{Failure, Outcome, Owner, Phase};
use migrate::{
    Asker, Clock, Collector, CollectorParts, Commit, CommitLine, Counters, Feed, Inbox, Note, Parcel, Post,
    Sender, SenderParts, Step, Trouble, Work, told,
};
use ram::Reach;
use scan::Kernel;
use std::sync::{Arc, MutexGuard, OnceLock};
use std::time::Duration;
use wire::{Format, Message, Opening, Session};

/// A whimbrel that migrates a VM away.
pub(crate) struct SourceEnd {
    net: Shared<Net>,
    log: Shared<Log>,
    life: Life,
    pub(crate) session: Session,
    inbox: Arc<Inbox<Note>>,
    collector: Option<Collector>,
    wake_at: Duration,
    outcome: Option<Outcome>,
    feed: Arc<Feed>,
    reach: Arc<OnceLock<Arc<dyn Reach>>>,
    parts: SenderParts,
    channels: Vec<Channel>,
    packets_ahead: usize,
    live: Live,
    line: Option<Line>,
    question: Shared<Option<Question>>,
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
    parcel: Parcel,
    wire: Option<WireId>,
    sender: Option<Sender<Port>>,
    over: bool,
}

impl SourceEnd {
    /// Connects and gets everything ready, as `migrate::source::run` does.
    pub(crate) fn new(
        plan: &Plan,
        net: Shared<Net>,
        log: Shared<Log>,
        life: Life,
        vm: SourceHandle,
        memory: Arc<Memory>,
    ) -> Self {
        let offer = plan.offer();
        let format = Format::new(plan.packet_pages * ram::PAGE as u32).expect("the plan's packets are sound");
        let layout = Arc::new(offer.layout.clone());
        let counters = Arc::new(Counters::default());
        let feed = Feed::new(&layout, plan.channels, format.packet_pages as usize, plan.detection);
        let parts = SenderParts {
            layout,
            format,
            kernel: Kernel::best(),
            normal_page_ratio: plan.normal_page_ratio,
            limiter: Arc::new(Limiter::new(None)),
            counters,
        };
        let mut source = Self {
            life,
            log,
            session: plan.session(),
            inbox: Arc::new(Inbox::default()),
            collector: None,
            wake_at: Duration::ZERO,
            outcome: None,
            feed: Arc::new(feed),
            reach: Arc::new(OnceLock::new()),
            channels: (0..plan.channels).map(|id| Channel::new(id, format)).collect(),
            parts,
            packets_ahead: plan.packets_ahead,
            live: Some(memory),
            line: None,
            question: shared(None),
            net,
        };
        match source.dial() {
            Ok(line) => source.begin(plan, line, vm),
            Err(error) => source.outcome = Some(unreached(&*error)),
        }
        source
    }

    fn dial(&self) -> Result<Line, Trouble> {
        let wire = self.net().connect(Link::Control)?;
        let writer = Control::dial(self.port(wire, None))?;
        let reader = Some(Control::new(self.port(wire, None)));
        Ok(Line { wire, writer: shared(writer), reader, beats: true, beat_at: BEAT })
    }

    fn begin(&mut self, plan: &Plan, line: Line, vm: SourceHandle) {
        let parts = CollectorParts {
            vm: Box::new(vm),
            hello: plan.hello(),
            limits: plan.limits,
            feed: self.feed.clone(),
            counters: self.parts.counters.clone(),
            kernel: self.parts.kernel,
            inbox: self.inbox.clone(),
            reach: self.reach.clone(),
            post: self.post(&line),
            commit: commit(&line),
            asker: self.asker(),
            clock: clock(&self.log),
            status: Arc::default(),
        };
        self.collector = Some(Collector::new(parts));
        self.line = Some(line);
    }

    /// How it ended, from its own point of view.
    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    /// Whether it was killed.
    pub(crate) fn is_killed(&self) -> bool {
        self.life.is_over()
    }

    /// Whether it is no more.
    pub(crate) fn is_over(&self) -> bool {
        self.is_killed() || self.outcome.is_some()
    }

    /// Where it stands; none when it is over.
    pub(crate) fn phase(&self) -> Option<Phase> {
        self.collector.as_ref().map(Collector::phase)
    }

    /// The channels.
    pub(crate) fn channels(&self) -> usize {
        self.channels.len()
    }

    /// The operator ends it.
    pub(crate) fn cancel(&self) {
        self.inbox.put(Note::Cancel);
    }

    /// SIGKILL. The kernel closes what was open; nothing else happens.
    pub(crate) fn kill(&mut self) {
        self.life.end();
        self.collector = None;
        self.close();
    }

    /// The main thread.
    pub(crate) fn step_collector(&mut self, now: Duration) -> bool {
        let Some(collector) = &mut self.collector else { return false };
        let had_asked = self.question.lock().expect("no holder panics").is_some();
        let step = collector.step(now);
        if self.life.is_over() {
            return true; // What it decided after its death nobody will ever know.
        }
        if collector.phase() != Phase::Setup {
            self.log.lock().expect("no holder panics").note(Moment::Round(self.feed.syncs()));
        }
        match step {
            Step::Again => true,
            Step::Wait(time_max) => {
                self.wake_at = now + time_max;
                !had_asked && self.question.lock().expect("no holder panics").is_some()
            }
            Step::Ended(outcome) => {
                self.log.lock().expect("no holder panics").line(format!("source: {outcome:?}"));
                self.outcome = Some(outcome);
                self.collector = None;
                self.close();
                true
            }
        }
    }

    /// The thread that reads control messages.
    pub(crate) fn step_reader(&mut self) -> bool {
        let Some(line) = &mut self.line else { return false };
        let Some(reader) = &mut line.reader else { return false };
        if !is_ready(&self.net, line.wire, End::Source) {
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
        if self.channels[at].over || self.is_over() || self.is_backed_up(at) {
            return false;
        }
        match self.send(at) {
            Ok(moved) => moved,
            Err(error) => {
                let channel = &mut self.channels[at];
                channel.over = true;
                self.inbox.put(Note::ChannelFailed { channel: channel.id, reason: told(&*error) });
                true
            }
        }
    }

    /// Asks what became of the commit, where that has to be asked.
    pub(crate) fn step_question(&mut self, now: Duration) -> bool {
        self.question.lock().expect("no holder panics").as_mut().is_some_and(|question| question.step(now))
    }

    /// When there is something to do although nothing came.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        let wake_at = self.collector.is_some().then_some(self.wake_at);
        let beat_at = self.line.as_ref().filter(|line| line.beats).map(|line| line.beat_at);
        let question = self.question.lock().expect("no holder panics");
        let asks_at = question.as_ref().filter(|_| !self.is_over()).and_then(Question::next_at);
        [wake_at, beat_at, asks_at].into_iter().flatten().min()
    }

    fn send(&mut self, at: usize) -> Result<bool, Trouble> {
        let channel = &mut self.channels[at];
        let work = self.feed.take(channel.id, &mut channel.parcel);
        if work == Work::Wait {
            return Ok(false);
        }
        if self.channels[at].sender.is_none() {
            self.open(at)?;
        }
        let channel = &mut self.channels[at];
        let sender = channel.sender.as_mut().expect("just opened");
        match work {
            Work::Send => {
                let ram = self.reach.get().expect("a VM is attached before its pages are published");
                sender.step(&**ram, &channel.parcel)?;
            }
            Work::Sync(_) => {
                sender.sync()?;
                self.feed.synced(channel.id);
            }
            Work::Stop => channel.over = true,
            Work::Wait => unreachable!("waiting was looked at"),
        }
        self.inbox.put(Note::Wake);
        Ok(true)
    }

    fn open(&mut self, at: usize) -> Result<(), Trouble> {
        let id = self.channels[at].id;
        let wire = self.net().connect(Link::Channel(id))?;
        self.channels[at].wire = Some(wire);
        let mut port = self.port(wire, self.live.clone());
        port.send_bytes(&Opening { uuid: [0; 16], channel: id, session: self.session }.encode())?;
        self.channels[at].sender = Some(Sender::new(self.parts.clone(), port));
        Ok(())
    }

    /// A socket's buffer is full.
    fn is_backed_up(&self, at: usize) -> bool {
        let packet_bytes = self.parts.format.packet_pages as usize * ram::PAGE;
        let backlog = |wire| self.net().backlog(wire, End::Target) > self.packets_ahead * packet_bytes;
        self.channels[at].wire.is_some_and(backlog)
    }

    fn post(&self, line: &Line) -> Post {
        let (writer, log) = (line.writer.clone(), self.log.clone());
        Box::new(move |message| {
            writer.lock().expect("no holder panics").send(message)?;
            let mut log = log.lock().expect("no holder panics");
            log.line(format!("source says {}", name(message)));
            match message {
                Message::Device(_) => log.note(Moment::Finished),
                Message::Confirmed => log.note(Moment::Confirmed),
                _ => {}
            }
            Ok(())
        })
    }

    fn asker(&self) -> Asker {
        let (question, log) = (self.question.clone(), self.log.clone());
        let (net, life) = (self.net.clone(), self.life.clone());
        Box::new(move |session| {
            let mut question = question.lock().expect("no holder panics");
            let question = question.get_or_insert_with(|| {
                let mut log = log.lock().expect("no holder panics");
                log.note(Moment::Asks);
                Question::new(net.clone(), life.clone(), session, log.now, log.now + ASK_MAX)
            });
            Some(question.answer()?.clone().map_err(Trouble::from))
        })
    }

    fn close(&mut self) {
        self.feed.stop();
        let lines = self.line.iter().map(|line| line.wire);
        let wires: Vec<_> = lines.chain(self.channels.iter().filter_map(|channel| channel.wire)).collect();
        wires.into_iter().for_each(|wire| self.net().hang_up(wire, End::Source));
        self.line = None;
        self.channels.iter_mut().for_each(|channel| (channel.over, channel.wire) = (true, None));
    }

    fn port(&self, wire: WireId, live: Live) -> Port {
        Port { net: self.net.clone(), wire, end: End::Source, life: self.life.clone(), live }
    }

    fn net(&self) -> MutexGuard<'_, Net> {
        self.net.lock().expect("no holder panics")
    }
}

impl Channel {
    fn new(id: u8, format: Format) -> Self {
        let parcel = Parcel::with_room(format.packet_pages as usize);
        Self { id, parcel, wire: None, sender: None, over: false }
    }
}

fn commit(line: &Line) -> Commit {
    let writer = line.writer.clone();
    Box::new(move |vm| {
        let mut bytes = Vec::new();
        Message::Commit.encode(&mut bytes).expect("a commit is short");
        vm.commit(&mut Held { control: writer.lock().expect("no holder panics"), bytes })
    })
}

/// The control connection while nobody else writes to it.
struct Held<'a> {
    control: MutexGuard<'a, Control<Port>>,
    bytes: Vec<u8>,
}

impl CommitLine for Held<'_> {
    fn send(&mut self) -> Result<(), Trouble> {
        Ok(self.control.transport_mut().send_bytes(&self.bytes)?)
    }

    fn socket(&self) -> Option<(std::os::fd::BorrowedFd<'_>, &[u8])> {
        None
    }
}

fn unreached(error: &(dyn std::error::Error + 'static)) -> Outcome {
    Outcome { owner: Owner::Source, failure: Some(Failure::Peer(told(error))), cancelled: false }
}

/// Within a step no simulated time passes.
pub(crate) fn clock(log: &Shared<Log>) -> Clock {
    let log = log.clone();
    Box::new(move || log.lock().expect("no holder panics").now)
}

/// A message in a word.
pub(crate) fn name(message: &Message) -> String {
    match message {
        Message::Device(state) => format!("device state of {} bytes", state.len()),
        Message::Hello(_) => "hello".into(),
        other => format!("{other:?}"),
    }
}

/// As the real ends do.
pub(crate) const BEAT: Duration = Duration::from_millis(250);
