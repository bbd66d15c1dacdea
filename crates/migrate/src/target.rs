//! Runs a target: listens, agrees with one source, gives each actor its thread, and returns when it is known who
//! owns the guest. Whoever connects may be hostile: nobody holds a thread for long without belonging to the
//! migration.

use crate::line::Line;
use crate::threads::Costs;
use crate::vm::TargetRam;
use crate::{
    Counters, Gate, Inbox, Keeper, KeeperParts, Landed, Lander, Landing, Note, Offer, Status, TargetStep,
    TargetVm, ThreadCpu, Trouble, told,
};
use channel::{Caller, Control, Listener, Stream};
use engine::TargetOutcome;
use ram::{Layout, PageSets};
use scan::Kernel;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::Scope;
use std::time::{Duration, Instant};
use wire::{Format, Hello, Message, Opening, Session, TargetState};

/// A target that waits for a source.
pub struct Setup {
    /// The VM that waits.
    pub vm: Box<dyn TargetVm>,
    /// Its RAM.
    pub ram: Arc<dyn TargetRam>,
    /// What the source must match.
    pub offer: Offer,
    /// Looks for zero pages where digests are compared.
    pub kernel: Kernel,
    /// For the operator's cancel.
    pub inbox: Arc<Inbox<Note>>,
    /// Kept up to date all along.
    pub status: Arc<Mutex<Status>>,
    /// Told which migration was agreed on, before its first page.
    pub agreed: Agreed,
    /// What is known of earlier migrations.
    pub recall: Recall,
}

/// Hears of the migration that was agreed on.
pub type Agreed = Box<dyn FnMut(&Hello) + Send>;

/// Remembers what became of a migration.
pub type Recall = Box<dyn Fn(Session) -> TargetState + Send + Sync>;

/// How a target ended.
pub struct Ended {
    /// Who owns the guest.
    pub outcome: TargetOutcome,
    /// The VM.
    pub vm: Box<dyn TargetVm>,
    /// Pages that held data before and are holes at the source.
    pub cleared_pages: u64,
}

/// Waits for a source and takes its guest. Refused sources and strangers don't end it; a migration does.
pub fn run(listener: &Listener, setup: Setup) -> Ended {
    let costs = Costs::default();
    let (arrive, arrivals) = mpsc::channel();
    let Setup { vm, ram, offer, kernel, inbox, status, agreed, recall } = setup;
    let hall = Hall {
        listener,
        layout: Arc::new(offer.layout.clone()),
        ram,
        inbox,
        recall,
        session: Mutex::new(None),
        open: Mutex::new(Vec::new()),
        callers: AtomicUsize::new(0),
        closed: AtomicBool::new(false),
        arrive: Mutex::new(arrive),
        costs: &costs,
    };
    let keeping = Keeping { offer, kernel, status: status.clone(), agreed, began: Instant::now() };
    let ended = std::thread::scope(|scope| {
        let greeter = costs.spawn(scope, "listener".into(), || hall.receive_callers(scope));
        let ended = match greeter {
            Ok(_) => keeping.run(vm, &hall, &arrivals, scope),
            Err(error) => Ended { outcome: TargetOutcome::Dropped(error.to_string()), vm, cleared_pages: 0 },
        };
        hall.close();
        ended
    });
    status.lock().expect("no holder panics").whimbrel.threads = receiving(costs.listed());
    ended
}

/// The threads that a migration is made of; those that greeted callers are left out.
fn receiving(threads: Vec<ThreadCpu>) -> Vec<ThreadCpu> {
    threads.into_iter().filter(|thread| thread.name != "caller").collect()
}

/// A source that has said hello.
struct Arrival {
    control: Control<Stream>,
    stream: Stream,
    hello: Hello,
}

/// The main thread's part: agrees with a source and keeps what it sends.
struct Keeping {
    offer: Offer,
    kernel: Kernel,
    status: Arc<Mutex<Status>>,
    agreed: Agreed,
    began: Instant,
}

impl Keeping {
    fn run<'scope>(
        mut self,
        vm: Box<dyn TargetVm>,
        hall: &'scope Hall<'_>,
        arrivals: &Receiver<Arrival>,
        scope: &'scope Scope<'scope, '_>,
    ) -> Ended {
        let (arrival, session) = match self.agree(hall, arrivals) {
            Ok(agreed) => agreed,
            Err(reason) => return Ended { outcome: TargetOutcome::Dropped(reason), vm, cleared_pages: 0 },
        };
        let line = Arc::new(Line::new(arrival.control, arrival.stream));
        let (beating, ended) = mpsc::channel();
        let started = hall.start_line(scope, line.clone(), ended);
        let keeper = Keeper::new(self.parts(vm, hall, &session, arrival.hello, &line), self.began.elapsed());
        if let Err(error) = started {
            hall.inbox.put(Note::Lost(error.to_string()));
        }
        let ended = self.drive(keeper, hall, &session);
        drop(beating);
        line.hang_up();
        ended
    }

    /// Waits for a source whose VM can become this one.
    fn agree(
        &mut self,
        hall: &Hall<'_>,
        arrivals: &Receiver<Arrival>,
    ) -> Result<(Arrival, Arc<Active>), String> {
        loop {
            while let Some(note) = hall.inbox.take() {
                if matches!(note, Note::Cancel) {
                    return Err("ended by the operator".into());
                }
            }
            let Ok(mut arrival) = arrivals.recv_timeout(LOOK_UP) else { continue };
            let session = self
                .offer
                .answer(&arrival.hello)
                .and_then(|accept| Active::new(hall, &arrival.hello, accept).map_err(|error| told(&*error)));
            match session {
                Ok(session) => {
                    (self.agreed)(&arrival.hello);
                    let session = Arc::new(session);
                    *hall.session() = Some(session.clone());
                    return Ok((arrival, session));
                }
                Err(reason) => {
                    // A source that hung up needs no reason.
                    let _ = arrival.control.send(&Message::Refuse { reason });
                }
            }
        }
    }

    fn parts(
        &self,
        vm: Box<dyn TargetVm>,
        hall: &Hall<'_>,
        session: &Active,
        hello: Hello,
        line: &Line,
    ) -> KeeperParts {
        KeeperParts {
            vm,
            ram: hall.ram.clone(),
            layout: hall.layout.clone(),
            hello,
            accept: session.accept.clone(),
            gate: session.gate.clone(),
            landing: session.landing.clone(),
            counters: session.counters.clone(),
            kernel: self.kernel,
            inbox: hall.inbox.clone(),
            post: line.post(),
            status: self.status.clone(),
        }
    }

    /// The keeper's loop; then answers for a while whoever asks what became of a commit.
    fn drive(&self, mut keeper: Keeper, hall: &Hall<'_>, session: &Active) -> Ended {
        let outcome = loop {
            match keeper.step(self.began.elapsed()) {
                TargetStep::Again => {}
                TargetStep::Wait(time_max) => hall.inbox.wait(time_max),
                TargetStep::Ended(outcome) => break outcome,
            }
        };
        session.gate.tear_down();
        if outcome != TargetOutcome::Running && keeper.was_ready() {
            session.settle(match outcome {
                TargetOutcome::InDoubt(_) => TargetState::Committed,
                _ => TargetState::NeverCommitted,
            });
            hall.answer_questions();
        }
        Ended { outcome, cleared_pages: keeper.cleared_pages(), vm: keeper.into_vm() }
    }
}

/// The migration that was agreed on.
struct Active {
    session: Session,
    format: Format,
    accept: wire::Accept,
    gate: Arc<Gate>,
    landing: Arc<Landing>,
    counters: Arc<Counters>,
    taken: Mutex<Vec<bool>>,
    settled: Mutex<Option<TargetState>>,
}

impl Active {
    fn new(hall: &Hall<'_>, hello: &Hello, accept: wire::Accept) -> Result<Self, Trouble> {
        Ok(Self {
            session: hello.session,
            format: Format::new(hello.packet_bytes)?,
            accept,
            gate: Arc::new(Gate::new(hello.channels)),
            landing: Arc::new(Landing::new(&*hall.ram, PageSets::new(&hall.layout))?),
            counters: Arc::new(Counters::default()),
            taken: Mutex::new(vec![false; hello.channels.into()]),
            settled: Mutex::new(None),
        })
    }

    /// Takes the place of a channel. None if it is no channel of this migration, or came already.
    fn take(&self, opening: &[u8]) -> Option<u8> {
        let mut taken = self.taken.lock().expect("no holder panics");
        let opening = Opening::decode(opening, taken.len() as u8).ok()?;
        let place = &mut taken[usize::from(opening.channel)];
        let fits = opening.session == self.session && !*place;
        *place |= fits;
        fits.then_some(opening.channel)
    }

    fn settle(&self, state: TargetState) {
        *self.settled.lock().expect("no holder panics") = Some(state);
    }
}

/// Where callers are received.
struct Hall<'a> {
    listener: &'a Listener,
    layout: Arc<Layout>,
    ram: Arc<dyn TargetRam>,
    inbox: Arc<Inbox<Note>>,
    recall: Recall,
    session: Mutex<Option<Arc<Active>>>,
    /// Every connection that a thread may wait on.
    open: Mutex<Vec<Stream>>,
    callers: AtomicUsize,
    closed: AtomicBool,
    arrive: Mutex<Sender<Arrival>>,
    costs: &'a Costs,
}

impl Hall<'_> {
    /// The listener's loop: each caller gets a thread for a moment.
    fn receive_callers<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        while !self.closed.load(Relaxed) {
            let Ok(Some(stream)) = self.listener.accept(LOOK_UP) else { continue };
            if self.callers.load(Relaxed) >= CALLERS_MAX {
                continue; // Dropped: strangers can't take more than this.
            }
            self.callers.fetch_add(1, Relaxed);
            // Without a thread for it the caller is dropped, and sees that.
            let _ = self.costs.spawn(scope, "caller".into(), move || {
                let page = self.greet(stream);
                self.callers.fetch_sub(1, Relaxed);
                if let Some((stream, channel)) = page {
                    self.start_channel(scope, stream, channel);
                }
            });
        }
    }

    /// Finds out who it is. A page channel is handed back; a stranger gets nothing, not even an answer.
    fn greet(&self, mut stream: Stream) -> Option<(Stream, u8)> {
        self.open.lock().expect("no holder panics").push(stream.try_clone().ok()?);
        match stream.caller(GREETING_MAX).ok()? {
            Caller::Page(opening) => {
                let channel = self.session().as_ref()?.take(&opening)?;
                Some((stream, channel))
            }
            Caller::Control => {
                let _ = self.control(stream);
                None
            }
        }
    }

    fn control(&self, mut stream: Stream) -> Result<(), Trouble> {
        stream.set_receive_by(Some(Instant::now() + GREETING_MAX))?;
        let clone = stream.try_clone()?;
        let mut control = Control::new(stream);
        match control.receive()? {
            Message::Hello(_) if self.session().is_some() => {
                let reason = "this target has a migration going already".into();
                Ok(control.send(&Message::Refuse { reason })?)
            }
            Message::Hello(hello) => {
                control.transport_mut().set_send_timeout(Some(SEND_MAX))?;
                let arrival = Arrival { control, stream: clone, hello };
                Ok(self.arrive.lock().expect("no holder panics").send(arrival)?)
            }
            Message::Ask { session } => {
                let state = self.state(session);
                control.send(&Message::Answer { session, state })?;
                if control.receive()? == Message::Confirmed {
                    self.inbox.put(Note::Message(Message::Confirmed));
                }
                Ok(())
            }
            other => Err(format!("a first message of kind {}", other.kind()).into()),
        }
    }

    /// What became of a migration. Asking about the one at hand ends it, unless its commit has come.
    fn state(&self, session: Session) -> TargetState {
        let Some(active) = self.session().clone().filter(|active| active.session == session) else {
            return (self.recall)(session);
        };
        if let Some(state) = *active.settled.lock().expect("no holder panics") {
            return state;
        }
        let (reply, answer) = mpsc::channel();
        self.inbox.put(Note::Asked(reply));
        answer.recv_timeout(ANSWER_MAX).unwrap_or(TargetState::Committed)
    }

    fn start_channel<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, stream: Stream, channel: u8) {
        let Some(active) = self.session().clone() else { return };
        let run = move || {
            if let Err(error) = self.land_all(&active, stream, channel) {
                self.inbox.put(Note::ChannelFailed { channel, reason: told(&*error) });
            }
        };
        if let Err(error) = self.costs.spawn(scope, format!("multifdrecv_{channel}"), run) {
            self.inbox.put(Note::ChannelFailed { channel, reason: error.to_string() });
        }
    }

    /// A channel's thread.
    fn land_all(&self, active: &Active, stream: Stream, channel: u8) -> Result<(), Trouble> {
        let (landing, counters) = (active.landing.clone(), active.counters.clone());
        let mut lander = Lander::new(stream, self.layout.clone(), active.format, landing, counters);
        loop {
            match lander.step(&*self.ram)? {
                Landed::Pages => {}
                Landed::Sync(sync) => {
                    active.gate.reach(channel, sync);
                    self.inbox.put(Note::Wake);
                    if !active.gate.pass(sync) {
                        return Ok(());
                    }
                }
                Landed::End => return Err("closed by the source".into()),
            }
        }
    }

    fn start_line<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        line: Arc<Line>,
        ended: Receiver<()>,
    ) -> std::io::Result<()> {
        let reader = line.clone();
        self.costs.spawn(scope, "control".into(), move || {
            if let Err(error) = reader.read(&self.inbox) {
                self.inbox.put(Note::Lost(error.to_string()));
            }
        })?;
        self.costs.spawn(scope, "heartbeat".into(), move || line.beat(&ended)).map(drop)
    }

    /// Stays for those who ask, until one has heard the answer.
    fn answer_questions(&self) {
        let end = Instant::now() + QUESTIONS_MAX;
        while Instant::now() < end {
            self.inbox.wait(LOOK_UP);
            while let Some(note) = self.inbox.take() {
                if matches!(note, Note::Message(Message::Confirmed) | Note::Cancel) {
                    return;
                }
            }
        }
    }

    fn close(&self) {
        self.closed.store(true, Relaxed);
        for stream in self.open.lock().expect("no holder panics").iter() {
            // What can't be shut down is gone already.
            let _ = stream.shutdown();
        }
    }

    fn session(&self) -> MutexGuard<'_, Option<Arc<Active>>> {
        self.session.lock().expect("no holder panics")
    }
}

/// How long a caller has to say who it is.
const GREETING_MAX: Duration = Duration::from_secs(5);

/// Callers that are being greeted at once: more than the channels of a migration connect together.
const CALLERS_MAX: usize = 300;

/// How often a waiting thread looks whether it is over.
const LOOK_UP: Duration = Duration::from_millis(50);

/// A source that takes no control message for so long is gone.
const SEND_MAX: Duration = Duration::from_secs(5);

/// QEMU may have to be ended before "never" can be said.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// A source that wrote *commit* into a broken connection asks within seconds.
const QUESTIONS_MAX: Duration = Duration::from_secs(30);
