//! Runs a target: listens, agrees with one source, gives each actor its thread, and returns when it is known who
//! owns the guest. Whoever connects may be hostile: nobody holds a thread for long without belonging to the
//! migration.

use crate::line::Line;
use crate::threads::Costs;
use crate::vm::TargetRam;
use crate::{
    Agreement, Desk, Inbox, Keeper, KeeperParts, Landed, Lander, Note, Offer, Recall, Status, TargetStep,
    TargetVm, ThreadCpu, Trouble, told,
};
use channel::{Caller, Control, Listener, Stream};
use engine::TargetOutcome;
use scan::Kernel;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::Scope;
use std::time::{Duration, Instant};
use wire::{Hello, Message, TargetState};

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
        desk: Desk::new(offer, inbox.clone(), recall),
        ram,
        inbox,
        open: Open::default(),
        callers: AtomicUsize::new(0),
        closed: AtomicBool::new(false),
        arrive: Mutex::new(arrive),
        costs: &costs,
    };
    let keeping = Keeping { kernel, status: status.clone(), agreed, began: Instant::now() };
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
    kernel: Kernel,
    status: Arc<Mutex<Status>>,
    agreed: Agreed,
    began: Instant,
}

impl Keeping {
    fn run<'scope>(
        mut self,
        mut vm: Box<dyn TargetVm>,
        hall: &'scope Hall<'_>,
        arrivals: &Receiver<Arrival>,
        scope: &'scope Scope<'scope, '_>,
    ) -> Ended {
        let agreed = self.look(hall, scope).and_then(|()| self.agree(&mut *vm, hall, arrivals, scope));
        let (arrival, agreement) = match agreed {
            Ok(agreed) => agreed,
            Err(reason) => return Ended { outcome: TargetOutcome::Dropped(reason), vm, cleared_pages: 0 },
        };
        let line = Arc::new(Line::new(arrival.control, arrival.stream));
        let (beating, ended) = mpsc::channel();
        let started = hall.start_line(scope, line.clone(), ended);
        let parts = self.parts(vm, hall, &agreement, arrival.hello, &line);
        let keeper = Keeper::new(parts, self.began.elapsed());
        if let Err(error) = started {
            hall.inbox.put(Note::Lost(error.to_string()));
        }
        let ended = self.drive(keeper, hall, &agreement);
        drop(beating);
        line.hang_up();
        ended
    }

    /// Has a thread of its own find out what the RAM holds.
    fn look<'scope>(&self, hall: &'scope Hall<'_>, scope: &'scope Scope<'scope, '_>) -> Result<(), String> {
        let landing = hall.desk.prepare(&*hall.ram, self.kernel).map_err(|error| told(&*error))?;
        // What this thread does not come to, or fails at, is looked at where it matters.
        let look = move || {
            let goes_on = || !hall.closed.load(Relaxed) && hall.desk.counts_on(&landing);
            drop(landing.look(&*hall.ram, goes_on));
        };
        hall.costs.spawn(scope, "look".into(), look).map(drop).map_err(|error| error.to_string())
    }

    /// Waits for a source whose VM can become this one.
    fn agree<'scope>(
        &mut self,
        vm: &mut dyn TargetVm,
        hall: &'scope Hall<'_>,
        arrivals: &Receiver<Arrival>,
        scope: &'scope Scope<'scope, '_>,
    ) -> Result<(Arrival, Arc<Agreement>), String> {
        loop {
            while let Some(note) = hall.inbox.take() {
                if matches!(note, Note::Cancel) {
                    return Err("ended by the operator".into());
                }
            }
            let Ok(mut arrival) = arrivals.recv_timeout(LOOK_UP) else { continue };
            if vm.has_written().map_err(|error| told(&*error))? {
                self.look(hall, scope)?;
            }
            match hall.desk.agree(&arrival.hello, &*hall.ram) {
                Ok(agreement) => {
                    (self.agreed)(&arrival.hello);
                    return Ok((arrival, agreement));
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
        agreement: &Agreement,
        hello: Hello,
        line: &Line,
    ) -> KeeperParts {
        KeeperParts {
            vm,
            ram: hall.ram.clone(),
            layout: agreement.layout.clone(),
            hello,
            accept: agreement.accept.clone(),
            gate: agreement.gate.clone(),
            landing: agreement.landing.clone(),
            counters: agreement.counters.clone(),
            kernel: self.kernel,
            inbox: hall.inbox.clone(),
            post: line.post(),
            clock: Box::new({
                let began = self.began;
                move || began.elapsed()
            }),
            status: self.status.clone(),
        }
    }

    /// The keeper's loop; then answers for a while whoever asks what became of a commit.
    fn drive(&self, mut keeper: Keeper, hall: &Hall<'_>, agreement: &Agreement) -> Ended {
        let outcome = loop {
            match keeper.step(self.began.elapsed()) {
                TargetStep::Again => {}
                TargetStep::Wait(time_max) => hall.inbox.wait(time_max),
                TargetStep::Ended(outcome) => break outcome,
            }
        };
        agreement.gate.tear_down();
        if let Some(state) = keeper.last_word(&outcome) {
            agreement.settle(state);
            hall.answer_questions();
        }
        Ended { outcome, cleared_pages: keeper.cleared_pages(), vm: keeper.into_vm() }
    }
}

/// Where callers are received.
struct Hall<'a> {
    listener: &'a Listener,
    desk: Desk,
    ram: Arc<dyn TargetRam>,
    inbox: Arc<Inbox<Note>>,
    /// Every connection of a caller that a thread may wait on.
    open: Open,
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
                let kept = self.open.keep(&stream);
                let page = kept.as_ref().and_then(|_| self.greet(stream));
                self.callers.fetch_sub(1, Relaxed);
                if let Some((stream, agreement, channel)) = page {
                    self.start_channel(scope, stream, kept, agreement, channel);
                }
            });
        }
    }

    /// Finds out who it is. A page channel is handed back; a stranger gets nothing, not even an answer.
    fn greet(&self, mut stream: Stream) -> Option<(Stream, Arc<Agreement>, u8)> {
        match stream.caller(GREETING_MAX).ok()? {
            Caller::Page(opening) => {
                let (agreement, channel) = self.desk.take(&opening)?;
                Some((stream, agreement, channel))
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
            Message::Hello(_) if self.desk.agreement().is_some() => {
                let reason = "this target has a migration going already".into();
                Ok(control.send(&Message::Refuse { reason })?)
            }
            Message::Hello(hello) => {
                control.transport_mut().set_send_timeout(Some(SEND_MAX))?;
                let arrival = Arrival { control, stream: clone, hello };
                Ok(self.arrive.lock().expect("no holder panics").send(arrival)?)
            }
            Message::Ask { session } => {
                let answer = self.desk.ask(session).recv_timeout(ANSWER_MAX);
                let state = answer.unwrap_or(TargetState::Committed);
                control.send(&Message::Answer { session, state })?;
                if control.receive()? == Message::Confirmed {
                    self.desk.confirm(session, state);
                }
                Ok(())
            }
            other => Err(format!("a first message of kind {}", other.kind()).into()),
        }
    }

    fn start_channel<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stream: Stream,
        kept: Option<Kept<'scope>>,
        agreement: Arc<Agreement>,
        channel: u8,
    ) {
        let run = move || {
            let _kept = kept;
            if let Err(error) = self.land_all(&agreement, stream, channel) {
                self.inbox.put(Note::ChannelFailed { channel, reason: told(&*error) });
            }
        };
        if let Err(error) = self.costs.spawn(scope, format!("multifdrecv_{channel}"), run) {
            self.inbox.put(Note::ChannelFailed { channel, reason: error.to_string() });
        }
    }

    /// A channel's thread.
    fn land_all(&self, agreement: &Agreement, stream: Stream, channel: u8) -> Result<(), Trouble> {
        let mut lander = Lander::new(
            stream,
            agreement.layout.clone(),
            agreement.format,
            agreement.landing.clone(),
            agreement.counters.clone(),
        );
        loop {
            match lander.step(&*self.ram)? {
                Landed::Pages => {}
                Landed::Sync(sync) => {
                    agreement.gate.reach(channel, sync);
                    self.inbox.put(Note::Wake);
                    if !agreement.gate.pass(sync) {
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

    /// Stays for those who ask, until one has heard the answer or the source says that it keeps the guest.
    fn answer_questions(&self) {
        let end = Instant::now() + QUESTIONS_MAX;
        while Instant::now() < end {
            self.inbox.wait(LOOK_UP);
            while let Some(note) = self.inbox.take() {
                use Message::{Cancel, Confirmed, Failed};
                if matches!(note, Note::Message(Confirmed | Cancel | Failed { .. }) | Note::Cancel) {
                    return;
                }
            }
        }
    }

    fn close(&self) {
        self.closed.store(true, Relaxed);
        self.listener.close();
        self.open.shut_down();
    }
}

/// Connections that can be ended while a thread waits on them. A caller that has left takes up nothing.
#[derive(Default)]
struct Open {
    streams: Mutex<BTreeMap<u64, Stream>>,
    next: AtomicU64,
}

impl Open {
    /// Keeps a clone of the connection until the answer is dropped. None if this process has no descriptor left.
    fn keep(&self, stream: &Stream) -> Option<Kept<'_>> {
        let clone = stream.try_clone().ok()?;
        let id = self.next.fetch_add(1, Relaxed);
        self.streams().insert(id, clone);
        Some(Kept { open: self, id })
    }

    fn shut_down(&self) {
        for stream in self.streams().values() {
            // What can't be shut down is gone already.
            let _ = stream.shutdown();
        }
    }

    fn streams(&self) -> MutexGuard<'_, BTreeMap<u64, Stream>> {
        self.streams.lock().expect("no holder panics")
    }
}

/// A connection that is kept while this lives.
struct Kept<'a> {
    open: &'a Open,
    id: u64,
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.open.streams().remove(&self.id);
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
