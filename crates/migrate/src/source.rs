//! Runs a source: connects, gives each actor its thread, and returns when it is known who owns the guest.

use crate::line::Line;
use crate::threads::Costs;
use crate::{
    Asker, Collector, CollectorParts, Counters, Feed, Inbox, Note, Offer, Parcel, Sender, SenderParts,
    SourceVm, Status, Step, Trouble, Work, told,
};
use channel::{Address, Control, Limiter, Stream, Transport};
use engine::{Failure, Limits, Outcome, Owner, ZeroPageDetection};
use ram::Reach;
use scan::Kernel;
use std::num::NonZeroU64;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::Scope;
use std::time::{Duration, Instant};
use wire::{Format, Message, Opening, Session, TargetState};

/// A migration to be run.
pub struct Setup {
    /// The VM.
    pub vm: Box<dyn SourceVm>,
    /// What the target must match.
    pub offer: Offer,
    /// Where the target listens.
    pub address: Address,
    /// Names this migration; drawn at random.
    pub session: Session,
    /// Whether the guest runs now.
    pub running: bool,
    /// `multifd-channels`, at least 1.
    pub channels: u8,
    /// `multifd-packet-size`.
    pub format: Format,
    /// `zero-page-detection`.
    pub detection: ZeroPageDetection,
    /// `multifd-normal-page-ratio`, 0 to 100.
    pub normal_page_ratio: u8,
    /// `max-bandwidth` in bytes a second, over all channels.
    pub bandwidth: Option<NonZeroU64>,
    /// Whether both ends compare digests of all RAM while the guest is stopped.
    pub verify: bool,
    /// What the decisions keep to.
    pub limits: Limits,
    /// Looks for zero pages.
    pub kernel: Kernel,
    /// For the operator's cancel.
    pub inbox: Arc<Inbox<Note>>,
    /// Kept up to date all along.
    pub status: Arc<Mutex<Status>>,
}

/// Runs a migration to its end. The VM comes back with the outcome.
pub fn run(setup: Setup) -> (Outcome, Box<dyn SourceVm>) {
    let began = Instant::now();
    let (control, stream) = match dial(&setup.address) {
        Ok(dialled) => dialled,
        Err(error) => return (unreached(&*error), setup.vm),
    };
    let round_trip = began.elapsed();
    let hello = setup.offer.hello(
        setup.session,
        setup.channels,
        setup.format.packet_pages * ram::PAGE as u32,
        setup.verify,
        setup.running,
    );
    let opening = Opening { uuid: setup.offer.uuid, channel: 0, session: setup.session };
    let counters = Arc::new(Counters::default());
    let packet_pages = setup.format.packet_pages as usize;
    let layout = &setup.offer.layout;
    let feed = Arc::new(Feed::new(layout, setup.channels, packet_pages, setup.detection));
    let line = Line::new(control, stream);
    let shared = Shared {
        parts: SenderParts {
            layout: Arc::new(setup.offer.layout.clone()),
            format: setup.format,
            kernel: setup.kernel,
            normal_page_ratio: setup.normal_page_ratio,
            limiter: Arc::new(Limiter::new(setup.bandwidth)),
            counters: counters.clone(),
        },
        address: setup.address.clone(),
        opening,
        wakes_sorter: setup.detection == ZeroPageDetection::Legacy,
        feed: feed.clone(),
        inbox: setup.inbox.clone(),
        reach: Arc::new(OnceLock::new()),
        streams: Mutex::new(Vec::new()),
    };
    let mut collector = Collector::new(CollectorParts {
        vm: setup.vm,
        hello,
        limits: setup.limits,
        feed,
        counters,
        kernel: setup.kernel,
        inbox: setup.inbox,
        reach: shared.reach.clone(),
        post: line.post(),
        commit: line.commit(),
        asker: asker(setup.address),
        clock: Box::new(move || began.elapsed()),
        status: setup.status.clone(),
    });
    collector.learn_round_trip(round_trip);
    let costs = Costs::default();
    let ended = run_threads(collector, &shared, &line, &costs, setup.channels, began);
    let mut status = setup.status.lock().expect("no holder panics");
    status.whimbrel.threads = costs.listed();
    drop(status);
    ended
}

fn run_threads(
    collector: Collector,
    shared: &Shared,
    line: &Line,
    costs: &Costs,
    channels: u8,
    began: Instant,
) -> (Outcome, Box<dyn SourceVm>) {
    let (beating, ended) = mpsc::channel();
    std::thread::scope(|scope| {
        shared.note_failure(shared.start_threads(scope, line, ended, costs, channels));
        let main = || drive(collector, &shared.inbox, began);
        let ended = costs.spawn(scope, "live_migration".into(), main);
        let ended = ended.expect("a thread for the decisions").join().expect("the collector does not panic");
        drop(beating);
        shared.stop();
        line.hang_up();
        ended
    })
}

/// The collector's loop.
fn drive(mut collector: Collector, inbox: &Inbox<Note>, began: Instant) -> (Outcome, Box<dyn SourceVm>) {
    loop {
        match collector.step(began.elapsed()) {
            Step::Again => {}
            Step::Wait(time_max) => inbox.wait(time_max),
            Step::Ended(outcome) => return (outcome, collector.into_vm()),
        }
    }
}

/// What the channel threads share.
struct Shared {
    parts: SenderParts,
    address: Address,
    opening: Opening,
    feed: Arc<Feed>,
    inbox: Arc<Inbox<Note>>,
    reach: Arc<OnceLock<Arc<dyn Reach>>>,
    /// `legacy`: the main thread waits for room in the feed.
    wakes_sorter: bool,
    /// To wake channels that wait for a target that takes nothing.
    streams: Mutex<Vec<Stream>>,
}

impl Shared {
    fn start_threads<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        line: &'scope Line,
        ended: Receiver<()>,
        costs: &'scope Costs,
        channels: u8,
    ) -> std::io::Result<()> {
        costs.spawn(scope, "control".into(), || self.note_failure(line.read(&self.inbox)))?;
        costs.spawn(scope, "heartbeat".into(), move || line.beat(&ended))?;
        for channel in 0..channels {
            costs.spawn(scope, format!("multifdsend_{channel}"), move || self.run_channel(channel))?;
        }
        Ok(())
    }

    /// A channel's thread: connects when there is something to send.
    fn run_channel(&self, channel: u8) {
        if let Err(error) = self.send_all(channel) {
            self.inbox.put(Note::ChannelFailed { channel, reason: told(&*error) });
        }
    }

    fn send_all(&self, channel: u8) -> Result<(), Trouble> {
        let mut parcel = Parcel::with_room(self.parts.format.packet_pages as usize);
        let mut work = self.feed.wait(channel, &mut parcel);
        if work == Work::Stop {
            return Ok(());
        }
        let mut sender = Sender::new(self.parts.clone(), self.open(channel)?);
        let ram = self.reach.get().expect("a VM is attached before its pages are published").clone();
        loop {
            match work {
                Work::Send => sender.step(&*ram, &parcel)?,
                Work::Sync(_) => {
                    sender.sync()?;
                    self.feed.synced(channel);
                }
                Work::Stop => return Ok(()),
                Work::Wait => unreachable!("waiting is the feed's part"),
            }
            if self.wakes_sorter || matches!(work, Work::Sync(_)) {
                self.inbox.put(Note::Wake);
            }
            work = self.feed.wait(channel, &mut parcel);
        }
    }

    fn open(&self, channel: u8) -> Result<Stream, Trouble> {
        let mut stream = Stream::connect(&self.address, CONNECT_MAX)?;
        self.streams.lock().expect("no holder panics").push(stream.try_clone()?);
        stream.send_bytes(&Opening { channel, ..self.opening }.encode())?;
        Ok(stream)
    }

    /// Sends the channels home, also those that wait for the target.
    fn stop(&self) {
        self.feed.stop();
        for stream in self.streams.lock().expect("no holder panics").iter() {
            // What can't be shut down is gone already.
            let _ = stream.shutdown();
        }
    }

    fn note_failure(&self, result: std::io::Result<()>) {
        if let Err(error) = result {
            self.inbox.put(Note::Lost(error.to_string()));
        }
    }
}

/// Connecting takes one round trip, which tells how long the others will take.
fn dial(address: &Address) -> Result<(Control<Stream>, Stream), Trouble> {
    let mut stream = Stream::connect(address, CONNECT_MAX)?;
    stream.set_send_timeout(Some(SEND_MAX))?;
    let clone = stream.try_clone()?;
    Ok((Control::dial(stream)?, clone))
}

fn unreached(error: &(dyn std::error::Error + 'static)) -> Outcome {
    Outcome { owner: Owner::Source, failure: Some(Failure::Peer(told(error))), cancelled: false }
}

/// Asks on connections of its own until there is an answer, or it has taken too long. It does so on a thread of its
/// own, since what the target still says on the old connection is an answer as well.
fn asker(address: Address) -> Asker {
    let mut asked = None;
    Box::new(move |session| {
        let answer = asked.get_or_insert_with(|| {
            let (tell, answer) = mpsc::channel();
            let address = address.clone();
            let ask = move || drop(tell.send(ask_on(&address, session)));
            std::thread::Builder::new().name("ask".into()).spawn(ask).map(|_| answer)
        });
        match answer.as_ref().map(Receiver::try_recv) {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(TryRecvError::Empty)) => None,
            Ok(Err(TryRecvError::Disconnected)) => Some(Err("nobody is left to ask".into())),
            Err(error) => Some(Err(error.to_string().into())),
        }
    })
}

fn ask_on(address: &Address, session: Session) -> Result<TargetState, Trouble> {
    let end = Instant::now() + ASK_MAX;
    loop {
        match ask(address, session) {
            Ok(TargetState::Committed) if Instant::now() < end => {}
            Err(_) if Instant::now() < end => {}
            answer => return answer,
        }
        std::thread::sleep(ASK_PAUSE);
    }
}

/// Asks the target what became of a migration. From then on it takes no commit for it that has not come yet.
pub fn ask(address: &Address, session: Session) -> Result<TargetState, Trouble> {
    let mut stream = Stream::connect(address, CONNECT_MAX)?;
    stream.set_receive_timeout(Some(ANSWER_MAX))?;
    let mut control = Control::dial(stream)?;
    control.send(&Message::Ask { session })?;
    loop {
        match control.receive()? {
            Message::Alive => {}
            Message::Answer { session: answered, state } if answered == session => {
                // An answer that came is an answer, whether the target hears that it did or not.
                let _ = control.send(&Message::Confirmed);
                return Ok(state);
            }
            other => return Err(format!("an answer of kind {} to a question", other.kind()).into()),
        }
    }
}

/// Connecting on a LAN takes far less; a name server may be slow.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// A target that takes no control message for so long is gone.
const SEND_MAX: Duration = Duration::from_secs(5);

/// The guest stands still while the target is asked. Longer than a link needs to come back from a hiccup.
const ASK_MAX: Duration = Duration::from_secs(5);
const ASK_PAUSE: Duration = Duration::from_millis(200);

/// A target may have to end its QEMU before it can say "never".
const ANSWER_MAX: Duration = Duration::from_secs(10);
