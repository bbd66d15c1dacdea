//! What goes wrong, and when.

use crate::log::Moment;
use crate::net::Link;
use crate::plan::{Plan, pick};
use crate::source_vm::SourceOp;
use crate::target_vm::TargetOp;
use crate::{End, How, Seed};
use std::time::Duration;
use wire::{CONTROL_GREETING, Message, Opening, Session, TargetState};

/// Something that goes wrong.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// A connection ends; what is in flight may get through.
    Cut(Link),
    /// It ends in the middle of a write, so many bytes after now, on the way to this end.
    CutAfter(Link, End, u64),
    /// Nothing gets to this end for a while.
    Stall(Link, End, Duration),
    /// Nothing gets to this end any more, and nobody is told.
    HalfOpen(Link, End),
    /// Nothing gets through anywhere for a while.
    NetworkDown(Duration),
    /// The whimbrel of this end is killed.
    Kill(End),
    /// The whimbrel of this end does nothing for a while: its host was paused.
    Suspend(End, Duration),
    /// The main thread of this end waits for its VM for a while.
    Freeze(End, Duration),
    /// The operator of this end ends it.
    Cancel(End),
    /// Somebody asks the target what became of the migration.
    Ask,
    /// Somebody who knows nothing asks, and confirms what he hears.
    AskAsStranger,
    /// Somebody else connects to the target and says this.
    Intrude(Vec<u8>),
    /// The next time the VM at the source is asked for this, it goes wrong.
    SourceFails(SourceOp, How),
    /// The next time the VM at the target is asked for this, it goes wrong.
    TargetFails(TargetOp, How),
    /// RAM of this end can be reached so many times more.
    RamFails(End, u64),
    /// A byte on the way to this end, so many bytes after now, arrives changed in these bits.
    Flip(Link, End, u64, u8),
    /// This end is sent a message that the other end did not write.
    Forge(End, Message),
    /// This end is sent bytes that mean nothing.
    Garbage(Link, End, Vec<u8>),
}

/// When something goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// At this step.
    Step(u64),
    /// So many steps after this moment.
    After(Moment, u64),
}

/// A fault that waits for its time.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// When.
    pub when: When,
    /// What.
    pub fault: Fault,
}

impl Fault {
    /// Whether it makes an end see what the other did not send.
    pub fn is_lie(&self) -> bool {
        matches!(self, Self::Flip(..) | Self::Forge(..) | Self::Garbage(..))
    }
}

/// Draws what goes wrong in a run: often one thing, sometimes several.
pub(crate) fn draw(random: &mut fastrand::Rng) -> Vec<Planned> {
    let count = pick(random, &[0, 1, 1, 1, 1, 2, 2, 3]);
    (0..count).map(|_| Planned { when: draw_when(random), fault: draw_fault(random) }).collect()
}

fn draw_when(random: &mut fastrand::Rng) -> When {
    if random.u8(..4) == 0 {
        // Early and late steps alike.
        return When::Step(1 << random.u32(..12) | random.u64(..4096) >> random.u32(..12));
    }
    let moments = [
        Moment::Agreed,
        Moment::Armed,
        Moment::Round(1),
        Moment::Round(2),
        Moment::Stopped,
        Moment::Saved,
        Moment::Finished,
        Moment::Loaded,
        Moment::Ready,
        Moment::Committed,
        Moment::Recorded,
        Moment::Started,
        Moment::Told,
        Moment::Asks,
        Moment::SourceOver,
    ];
    When::After(pick(random, &moments), random.u64(..64) >> random.u32(..7))
}

fn draw_fault(random: &mut fastrand::Rng) -> Fault {
    let (link, end) = (draw_link(random), pick(random, &[End::Source, End::Target]));
    let time = Duration::from_millis(random.u64(1..20_000) >> random.u32(..8));
    let bytes = random.u64(..1 << 17) >> random.u32(..17);
    match random.u8(..23) {
        0 | 1 => Fault::Cut(link),
        2 | 3 => Fault::CutAfter(link, end, bytes),
        4 => Fault::Stall(link, end, time),
        5 => Fault::HalfOpen(link, end),
        6 => Fault::NetworkDown(time),
        7..=9 => Fault::Kill(end),
        10 => Fault::Cancel(end),
        11 => pick(random, &[&Fault::Ask, &Fault::Ask, &Fault::AskAsStranger]).clone(),
        12..=14 => Fault::SourceFails(draw_source_op(random), draw_how(random)),
        15 | 16 => Fault::TargetFails(draw_target_op(random), draw_how(random)),
        17 => Fault::RamFails(end, random.u64(..64)),
        18 => Fault::Flip(link, end, bytes, 1 << random.u8(..8)),
        19 => Fault::Suspend(end, time),
        20 => Fault::Freeze(end, time),
        21 => Fault::Intrude(draw_intrusion(random)),
        _ => draw_forgery(random, link, end),
    }
}

fn draw_link(random: &mut fastrand::Rng) -> Link {
    match random.u8(..7) {
        0..4 => Link::Control,
        4 => Link::Question,
        channel => Link::Channel(channel - 5),
    }
}

fn draw_how(random: &mut fastrand::Rng) -> How {
    pick(random, &[How::Undone, How::Done, How::KilledBefore, How::KilledAfter])
}

fn draw_source_op(random: &mut fastrand::Rng) -> SourceOp {
    use SourceOp as S;
    pick(random, &[S::Attach, S::Stop, S::Resume, S::Save, S::Commit, S::Commit, S::Retire])
}

fn draw_target_op(random: &mut fastrand::Rng) -> TargetOp {
    use TargetOp as T;
    pick(random, &[T::Load, T::Record, T::Start, T::End])
}

/// What a stranger may say: nothing, anything, or something that makes sense from somebody else.
fn draw_intrusion(random: &mut fastrand::Rng) -> Vec<u8> {
    let session = Session([9; 16]);
    let mut bytes = match random.u8(..4) {
        0 => return garbage(random),
        1 => return Opening { uuid: [0; 16], channel: random.u8(..4), session }.encode().to_vec(),
        _ => CONTROL_GREETING.to_vec(),
    };
    let said = [Message::Hello(Plan::plain(Seed(1)).hello()), Message::Commit, Message::Cancel];
    let said = &said[random.usize(..said.len())];
    said.encode(&mut bytes).expect("short messages");
    bytes
}

fn garbage(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut garbage = vec![0; random.usize(..1 << 9)];
    random.fill(&mut garbage);
    garbage
}

fn draw_forgery(random: &mut fastrand::Rng, link: Link, end: End) -> Fault {
    if random.bool() {
        return Fault::Garbage(link, end, garbage(random));
    }
    let session = Session([7; 16]);
    let state = TargetState::NeverCommitted;
    let messages = [
        Message::Ask { session },
        Message::Finish { sync: random.u64(..9) },
        Message::Device(vec![1; 100]),
        Message::Commit,
        Message::Confirmed,
        Message::Hashes { blocks: vec![] },
        Message::Refuse { reason: "no".into() },
        Message::Synced { sync: 1 },
        Message::Verified { pages: 1 },
        Message::Ready { load_ms: 1 },
        Message::Running,
        Message::Answer { session, state },
        Message::Failed { reason: "no".into() },
        Message::Cancel,
        Message::Alive,
    ];
    Fault::Forge(end, messages[random.usize(..messages.len())].clone())
}
