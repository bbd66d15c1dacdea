//! The simulated network: connections as two pipes of bytes each, with everything that a network does to them.
//! Knows no meaning of the bytes.
//!
//! Like TCP, a pipe delivers what was written in its order, late, in pieces, and up to some point; who writes learns
//! late that nobody reads. What is stuck for [`STUCK_MAX`] ends the connection, as the real one's time limits do.

use crate::memory::{Live, gather, scatter};
use crate::{End, Shared};
use channel::Transport;
use ram::{Span, SpanMut};
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The control connection.
    Control,
    /// A page channel.
    Channel(u8),
    /// Somebody asks what became of the migration.
    Question,
}

/// All connections there have been.
#[derive(Debug)]
pub(crate) struct Net {
    wires: Vec<Wire>,
    random: fastrand::Rng,
    now: Duration,
    /// Until then nothing gets through and nobody can connect.
    down_until: Duration,
    /// What will be done to connections that don't exist yet.
    waiting: Vec<(Link, Harm)>,
}

/// What a fault does to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    /// Ends it; what is in flight may get through.
    Cut,
    /// Ends it when the pipe to this end has carried so many bytes.
    CutAt(End, u64),
    /// Nothing gets to this end for a while.
    Stall(End, Duration),
    /// Nothing gets to this end any more.
    Kill(End),
    /// Changes the byte that the pipe to this end carries at this place.
    Flip(End, u64, u8),
}

/// Which connection, for its ends.
pub(crate) type WireId = usize;

#[derive(Debug)]
struct Wire {
    link: Link,
    /// By the end that reads.
    to_source: Pipe,
    to_target: Pipe,
    accepted: bool,
}

#[derive(Debug, Default)]
struct Pipe {
    in_flight: VecDeque<u8>,
    arrived: VecDeque<u8>,
    carried: u64,
    cut_at: Option<u64>,
    flips: Vec<(u64, u8)>,
    /// Nothing comes after what is in flight, and how the reader sees it.
    ended: Option<ErrorKind>,
    /// The end has got to the reader.
    end_arrived: bool,
    /// Nobody reads any more.
    unread: bool,
    stalled_until: Duration,
    dead: bool,
    stuck_since: Option<Duration>,
}

impl Net {
    pub(crate) fn new(random: fastrand::Rng) -> Self {
        Self { wires: vec![], random, now: Duration::ZERO, down_until: Duration::ZERO, waiting: vec![] }
    }

    /// Opens a connection, if the network is there.
    pub(crate) fn connect(&mut self, link: Link) -> io::Result<WireId> {
        if self.now < self.down_until {
            return Err(ErrorKind::TimedOut.into());
        }
        let (to_source, to_target) = (Pipe::default(), Pipe::default());
        self.wires.push(Wire { link, to_source, to_target, accepted: false });
        let (now, later) = self.waiting.drain(..).partition(|(waiting, _)| *waiting == link);
        self.waiting = later;
        let now: Vec<_> = now;
        now.into_iter().for_each(|(link, harm)| self.harm(link, harm));
        Ok(self.wires.len() - 1)
    }

    /// A connection that nobody has accepted yet.
    pub(crate) fn accept(&mut self) -> Option<WireId> {
        let wire = self.wires.iter().position(|wire| !wire.accepted)?;
        self.wires[wire].accepted = true;
        Some(wire)
    }

    /// Does harm to the newest connection for this, or to the next one if there is none.
    pub(crate) fn harm(&mut self, link: Link, harm: Harm) {
        let Some(wire) = self.wires.iter().rposition(|wire| wire.link == link) else {
            return self.waiting.push((link, harm));
        };
        match harm {
            Harm::Cut => self.cut(wire),
            Harm::CutAt(end, bytes) => self.pipe(wire, end).cut_at = Some(bytes),
            Harm::Stall(end, time) => {
                let until = self.now + time;
                self.pipe(wire, end).stalled_until = until;
            }
            Harm::Kill(end) => self.pipe(wire, end).dead = true,
            Harm::Flip(end, at, bits) => self.pipe(wire, end).flips.push((at, bits)),
        }
    }

    /// Nothing gets through for a while.
    pub(crate) fn go_down(&mut self, time: Duration) {
        self.down_until = self.now + time;
        for wire in &mut self.wires {
            wire.to_source.stalled_until = self.down_until;
            wire.to_target.stalled_until = self.down_until;
        }
    }

    /// Puts bytes on the newest connection for this, as if its writer had written them.
    pub(crate) fn inject(&mut self, link: Link, end: End, bytes: &[u8]) {
        if let Some(wire) = self.wires.iter().rposition(|wire| wire.link == link) {
            self.pipe(wire, end).in_flight.extend(bytes);
        }
    }

    /// Somebody connects to the target, says this, and leaves.
    pub(crate) fn intrude(&mut self, bytes: &[u8]) {
        let Ok(wire) = self.connect(Link::Question) else { return };
        // He says it whether it gets through or not.
        let _ = self.write(wire, End::Target, bytes);
        self.hang_up(wire, End::Source);
    }

    /// From now on everything new gets through.
    pub(crate) fn heal(&mut self) {
        self.down_until = self.now;
        self.waiting.clear();
    }

    /// Ends what is stuck for too long.
    pub(crate) fn tick(&mut self, now: Duration) {
        self.now = now;
        for wire in 0..self.wires.len() {
            let Wire { to_source, to_target, .. } = &mut self.wires[wire];
            if to_source.is_lost(now) | to_target.is_lost(now) {
                self.wires[wire].to_source.end_at_once();
                self.wires[wire].to_target.end_at_once();
            }
        }
    }

    /// When [`Net::tick`] or [`Net::deliver`] will have something to do that it has not now.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        let pipes = self.wires.iter().flat_map(|wire| [&wire.to_source, &wire.to_target]);
        pipes.filter_map(|pipe| pipe.next_at(self.now)).min()
    }

    /// Whether everything has got where it will get.
    pub(crate) fn is_quiet(&self) -> bool {
        let still = |pipe: &Pipe| {
            pipe.unread || pipe.in_flight.is_empty() && pipe.ended.is_some() == pipe.end_arrived
        };
        self.wires.iter().all(|wire| wire.accepted && still(&wire.to_source) && still(&wire.to_target))
    }

    /// Every pipe that has something to deliver.
    pub(crate) fn loaded(&self) -> impl Iterator<Item = (WireId, End)> + '_ {
        let ends = |(at, wire): (usize, &Wire)| {
            let source = wire.to_source.is_loaded(self.now).then_some((at, End::Source));
            let target = wire.to_target.is_loaded(self.now).then_some((at, End::Target));
            source.into_iter().chain(target)
        };
        self.wires.iter().enumerate().flat_map(ends)
    }

    /// Brings some bytes, or all, to the end that reads them.
    pub(crate) fn deliver(&mut self, wire: WireId, end: End) -> bool {
        let (all, share) = (self.random.bool(), self.random.f64());
        let now = self.now;
        let pipe = self.pipe(wire, end);
        if !pipe.is_loaded(now) {
            return false;
        }
        let bytes = pipe.in_flight.len();
        let count = if all { bytes } else { ((bytes as f64 * share) as usize).max(1).min(bytes) };
        let Pipe { in_flight, arrived, .. } = pipe;
        arrived.extend(in_flight.drain(..count));
        pipe.end_arrived = pipe.ended.is_some() && pipe.in_flight.is_empty();
        true
    }

    /// One end hangs up: what it wrote may get through, what it did not read is lost.
    pub(crate) fn hang_up(&mut self, wire: WireId, end: End) {
        let rude = self.random.bool();
        let unread = !self.pipe(wire, end).arrived.is_empty() || !self.pipe(wire, end).in_flight.is_empty();
        self.pipe(wire, end).unread = true;
        let to_other = self.pipe(wire, end.other());
        to_other.ended.get_or_insert(ErrorKind::UnexpectedEof);
        if unread && rude {
            // The kernel answers unread bytes with a reset, which overtakes what was written.
            self.lose_some(wire, end.other());
        }
    }

    /// What has arrived at an end, and whether nothing will come after it.
    pub(crate) fn arrived(&self, wire: WireId, end: End) -> (&VecDeque<u8>, bool) {
        let pipe = match end {
            End::Source => &self.wires[wire].to_source,
            End::Target => &self.wires[wire].to_target,
        };
        (&pipe.arrived, pipe.end_arrived)
    }

    /// Bytes written to an end and not read there.
    pub(crate) fn backlog(&self, wire: WireId, end: End) -> usize {
        let pipe = match end {
            End::Source => &self.wires[wire].to_source,
            End::Target => &self.wires[wire].to_target,
        };
        match pipe.ended.is_some() || pipe.unread {
            true => 0, // The writer is about to learn it.
            false => pipe.in_flight.len() + pipe.arrived.len(),
        }
    }

    /// Bytes that the pipe to an end of a link has carried.
    pub(crate) fn carried(&self, link: Link, end: End) -> u64 {
        let wire = self.wires.iter().rfind(|wire| wire.link == link);
        wire.map_or(0, |wire| match end {
            End::Source => wire.to_source.carried,
            End::Target => wire.to_target.carried,
        })
    }

    fn write(&mut self, wire: WireId, to: End, bytes: &[u8]) -> Result<(), Partly> {
        // A reset for lack of a reader comes back on the other pipe.
        let back_dead = self.pipe(wire, to.other()).dead;
        let pipe = self.pipe(wire, to);
        if pipe.ended.is_some() || pipe.unread && !back_dead {
            return Err(Partly { sent: 0 });
        }
        let room = pipe.cut_at.map_or(u64::MAX, |at| at.saturating_sub(pipe.carried));
        let sent = bytes.len().min(room as usize);
        let from = pipe.carried;
        for (at, byte) in (from..).zip(&bytes[..sent]) {
            let bits = pipe.flips.iter().filter(|flip| flip.0 == at).fold(0, |bits, flip| bits ^ flip.1);
            pipe.in_flight.push_back(byte ^ bits);
        }
        pipe.carried += sent as u64;
        if sent < bytes.len() {
            self.cut(wire);
            return Err(Partly { sent });
        }
        Ok(())
    }

    fn read(&mut self, wire: WireId, end: End, bytes: usize) -> (Vec<u8>, Option<ErrorKind>) {
        let pipe = self.pipe(wire, end);
        let count = bytes.min(pipe.arrived.len());
        let read = pipe.arrived.drain(..count).collect();
        let error = (count < bytes).then(|| {
            assert!(
                pipe.end_arrived,
                "a read of {bytes} bytes that would wait: the simulator stepped it too early"
            );
            pipe.ended.expect("an end that arrived")
        });
        (read, error)
    }

    fn cut(&mut self, wire: WireId) {
        for end in [End::Source, End::Target] {
            let gets_through = self.random.bool();
            let pipe = self.pipe(wire, end);
            pipe.ended.get_or_insert(ErrorKind::ConnectionReset);
            if !gets_through {
                self.lose_some(wire, end);
            }
        }
    }

    fn lose_some(&mut self, wire: WireId, end: End) {
        let share = self.random.f64();
        let pipe = self.pipe(wire, end);
        let left = (pipe.in_flight.len() as f64 * share) as usize;
        pipe.in_flight.truncate(left);
        pipe.ended = Some(ErrorKind::ConnectionReset);
    }

    fn pipe(&mut self, wire: WireId, reader: End) -> &mut Pipe {
        let wire = &mut self.wires[wire];
        match reader {
            End::Source => &mut wire.to_source,
            End::Target => &mut wire.to_target,
        }
    }
}

impl Pipe {
    fn is_loaded(&self, now: Duration) -> bool {
        let something = !self.in_flight.is_empty() || self.ended.is_some() && !self.end_arrived;
        something && !self.dead && now >= self.stalled_until
    }

    /// Whether it is stuck for so long that both ends give it up.
    fn is_lost(&mut self, now: Duration) -> bool {
        let stuck = self.dead || now < self.stalled_until && !self.in_flight.is_empty();
        if !stuck || self.end_arrived {
            self.stuck_since = None;
            return false;
        }
        now >= *self.stuck_since.get_or_insert(now) + STUCK_MAX
    }

    fn end_at_once(&mut self) {
        self.in_flight.clear();
        self.ended = Some(ErrorKind::TimedOut);
        self.end_arrived = true;
        self.dead = false;
        self.stalled_until = Duration::ZERO;
    }

    fn next_at(&self, now: Duration) -> Option<Duration> {
        let stalled = (now < self.stalled_until).then_some(self.stalled_until);
        let stuck = self.stuck_since.map(|since| since + STUCK_MAX);
        stalled.into_iter().chain(stuck).filter(|&at| at > now).min()
    }
}

/// Whether a process lives. What is dead has no effect on anything any more.
#[derive(Clone, Debug)]
pub(crate) struct Life(Arc<AtomicBool>);

impl Life {
    pub(crate) fn new() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }

    pub(crate) fn end(&self) {
        self.0.store(false, Relaxed);
    }

    pub(crate) fn is_over(&self) -> bool {
        !self.0.load(Relaxed)
    }
}

/// One end of a connection.
#[derive(Clone)]
pub(crate) struct Port {
    pub(crate) net: Shared<Net>,
    pub(crate) wire: WireId,
    pub(crate) end: End,
    pub(crate) life: Life,
    /// Changes while pages are sent.
    pub(crate) live: Live,
}

/// How much of a failed write went out.
#[derive(Debug, thiserror::Error)]
#[error("the connection is gone, {sent} bytes of this were sent")]
pub(crate) struct Partly {
    pub(crate) sent: usize,
}

impl Transport for Port {
    fn send(&mut self, spans: &[Span<'_>]) -> io::Result<()> {
        let bytes = gather(spans, &self.live);
        if self.life.is_over() {
            return Err(io::Error::new(ErrorKind::BrokenPipe, Partly { sent: 0 }));
        }
        let written = self.net.lock().expect("no holder panics").write(self.wire, self.end.other(), &bytes);
        written.map_err(|partly| io::Error::new(ErrorKind::BrokenPipe, partly))
    }

    fn receive(&mut self, spans: &mut [SpanMut<'_>]) -> io::Result<()> {
        let wanted = spans.iter().map(|span| span.len()).sum();
        let (bytes, error) = self.net.lock().expect("no holder panics").read(self.wire, self.end, wanted);
        scatter(&bytes, spans);
        error.map_or(Ok(()), |kind| Err(kind.into()))
    }
}

/// As the limits that `channel` sets on its sockets.
const STUCK_MAX: Duration = Duration::from_secs(15);
