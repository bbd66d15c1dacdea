//! One connection over TCP or a Unix socket.

use crate::unix::connect_file;
use crate::{Address, ChannelError, Transport, vectored};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, SockaddrStorage, getpeername, setsockopt, shutdown, sockopt};
use nix::sys::time::TimeVal;
use ram::{Span, SpanMut};
use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use wire::{CONTROL_GREETING, CONTROL_MAGIC, OPENING_BYTES, PAGE_MAGIC};

/// A connection over TCP or a Unix socket. Without a time limit it waits for as long as the other end lives.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    peer: String,
    receive_timeout: Option<Duration>,
    receive_by: Option<Instant>,
}

impl Stream {
    /// Connects within `timeout`, to the first of a name's addresses that answers.
    pub fn connect(address: &Address, timeout: Duration) -> Result<Self, ChannelError> {
        let failed = |source| ChannelError::Connect { address: address.clone(), source };
        match address {
            Address::Unix { path } => {
                let socket = connect_file(path, timeout).map_err(failed)?;
                Self::unix(socket, address.to_string()).map_err(failed)
            }
            Address::Tcp { host, port } => {
                let places = (host.as_str(), *port).to_socket_addrs();
                let places =
                    places.map_err(|source| ChannelError::Resolve { address: address.clone(), source })?;
                let socket = connect_any(places, timeout).map_err(failed)?;
                Self::tcp(socket.into(), address.to_string()).map_err(failed)
            }
        }
    }

    /// A TCP connection that stands.
    pub(crate) fn tcp(socket: OwnedFd, peer: String) -> io::Result<Self> {
        setsockopt(&socket, sockopt::TcpNoDelay, &true)?;
        setsockopt(&socket, sockopt::TcpUserTimeout, &UNACKNOWLEDGED_MS_MAX)?;
        setsockopt(&socket, sockopt::KeepAlive, &true)?;
        setsockopt(&socket, sockopt::TcpKeepIdle, &PROBE_AFTER_S)?;
        setsockopt(&socket, sockopt::TcpKeepInterval, &PROBE_EVERY_S)?;
        setsockopt(&socket, sockopt::TcpKeepCount, &PROBES)?;
        if is_loopback(&socket) {
            // Only costs time if it fails.
            let _ = setsockopt(&socket, sockopt::TcpCongestion, &OsString::from(UNPACED));
        }
        Ok(Self::new(socket, peer))
    }

    /// A Unix connection that stands. It can't fall silent: its end dies with the process.
    pub(crate) fn unix(socket: OwnedFd, peer: String) -> io::Result<Self> {
        // Above what the system allows by default only root may go; the others get as much as is allowed.
        if setsockopt(&socket, sockopt::SndBufForce, &UNIX_BUFFER_BYTES).is_err() {
            setsockopt(&socket, sockopt::SndBuf, &UNIX_BUFFER_BYTES)?;
        }
        Ok(Self::new(socket, peer))
    }

    fn new(socket: OwnedFd, peer: String) -> Self {
        Self { socket, peer, receive_timeout: None, receive_by: None }
    }

    /// Who is at the other end, for messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The same connection for another thread. Time limits set on one hold for both, except
    /// [`Stream::set_receive_by`].
    pub fn try_clone(&self) -> io::Result<Self> {
        let socket = self.socket.try_clone()?;
        Ok(Self { socket, peer: self.peer.clone(), receive_by: None, ..*self })
    }

    /// Ends the connection in both directions, for every clone of it. Threads that wait on it wake with an error.
    pub fn shutdown(&self) -> io::Result<()> {
        match shutdown(self.socket.as_raw_fd(), Shutdown::Both) {
            Ok(()) | Err(Errno::ENOTCONN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// How long the other end may be silent while we receive; an error of kind `TimedOut` then.
    pub fn set_receive_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.receive_timeout = timeout;
        set_receive_timeout(self.as_fd(), timeout)
    }

    /// How long the other end may take nothing while we send; an error of kind `TimedOut` then.
    pub fn set_send_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        set_send_timeout(self.as_fd(), timeout)
    }

    /// When everything must have come in that is received from now on, however busily the other end sends: one
    /// byte a second keeps no stranger alive. None takes the limit away.
    pub fn set_receive_by(&mut self, end: Option<Instant>) -> io::Result<()> {
        self.receive_by = end;
        set_receive_timeout(self.as_fd(), self.receive_timeout)
    }

    /// Waits until there is something to receive or the connection has ended. False if neither happens in time.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        wait_for(self.as_fd(), PollFlags::POLLIN, timeout)
    }

    /// Reads what one who has just connected is, and the opening of a page channel, all of it within `timeout`.
    pub fn caller(&mut self, timeout: Duration) -> Result<Caller, ChannelError> {
        let peer = self.peer.clone();
        let silent = |source| ChannelError::Silent { peer: peer.clone(), source };
        self.set_receive_by(Some(Instant::now() + timeout)).map_err(silent)?;
        let mut first = [0; 4];
        self.receive_bytes(&mut first).map_err(silent)?;
        let caller = match classify(first) {
            Some(Kind::Page) => {
                let mut opening = [0; OPENING_BYTES];
                opening[..4].copy_from_slice(&first);
                self.receive_bytes(&mut opening[4..]).map_err(silent)?;
                Caller::Page(opening)
            }
            Some(Kind::Control) => {
                let mut rest = [0; CONTROL_GREETING.len() - 4];
                self.receive_bytes(&mut rest).map_err(silent)?;
                if rest != CONTROL_GREETING[4..] {
                    return Err(stranger(peer, first));
                }
                Caller::Control
            }
            None => return Err(stranger(peer, first)),
        };
        self.set_receive_by(None).map_err(silent)?;
        Ok(caller)
    }
}

impl Transport for Stream {
    fn send(&mut self, spans: &[Span<'_>]) -> io::Result<()> {
        vectored::send(self.socket.as_fd(), spans)
    }

    fn receive(&mut self, spans: &mut [SpanMut<'_>]) -> io::Result<()> {
        let (socket, timeout, end) = (self.socket.as_fd(), self.receive_timeout, self.receive_by);
        vectored::receive(socket, spans, || match end {
            Some(end) => limit_next(socket, timeout, end),
            None => Ok(()),
        })
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn is_loopback(socket: &OwnedFd) -> bool {
    let peer = getpeername::<SockaddrStorage>(socket.as_raw_fd());
    peer.is_ok_and(|peer| {
        let v4 = peer.as_sockaddr_in().is_some_and(|peer| peer.ip().is_loopback());
        v4 || peer.as_sockaddr_in6().is_some_and(|peer| peer.ip().to_canonical().is_loopback())
    })
}

/// Who has connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A control connection; its greeting has been read.
    Control,
    /// A page channel, with the bytes for [`wire::Opening::decode`].
    Page([u8; OPENING_BYTES]),
}

/// What kind of connection it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Messages.
    Control,
    /// Packets.
    Page,
}

/// What kind of connection starts with these bytes. None for a stranger.
pub fn classify(first: [u8; 4]) -> Option<Kind> {
    match u32::from_be_bytes(first) {
        CONTROL_MAGIC => Some(Kind::Control),
        PAGE_MAGIC => Some(Kind::Page),
        _ => None,
    }
}

fn stranger(peer: String, first: [u8; 4]) -> ChannelError {
    let hint = match &first {
        b"WHMB" => ", a control connection of a kind that this version does not know",
        b"QEVM" => ", which is QEMU's own migration",
        b"SSH-" => ", which is SSH",
        b"GET " | b"HEAD" | b"POST" => ", which is HTTP",
        [0x16, 0x03, ..] => ", which is TLS",
        _ => "",
    };
    ChannelError::Stranger { peer, first: u32::from_be_bytes(first), hint }
}

/// Lets the next call into the kernel wait until `end`, and no longer than `timeout`.
fn limit_next(socket: BorrowedFd<'_>, timeout: Option<Duration>, end: Instant) -> io::Result<()> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    set_receive_timeout(socket, Some(timeout.map_or(left, |timeout| timeout.min(left))))
}

fn connect_any(places: impl Iterator<Item = SocketAddr>, timeout: Duration) -> io::Result<TcpStream> {
    let end = Instant::now() + timeout;
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for place in places {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&place, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Waits for one of `events`, or for the end of the connection.
pub(crate) fn wait_for(socket: BorrowedFd<'_>, events: PollFlags, timeout: Duration) -> io::Result<bool> {
    let end = Instant::now() + timeout;
    loop {
        // Rounded up, so that the last fraction of a millisecond is not spent in a spin.
        let left = end.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
        let left_ms = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(socket, events)], left_ms) {
            Ok(0) if Instant::now() >= end => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

pub(crate) fn set_send_timeout(socket: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<()> {
    Ok(setsockopt(&socket, sockopt::SendTimeout, &time_val(timeout))?)
}

fn set_receive_timeout(socket: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<()> {
    Ok(setsockopt(&socket, sockopt::ReceiveTimeout, &time_val(timeout))?)
}

/// A timeout as the kernel wants it: zero is none, so no timeout may be as short as that.
fn time_val(timeout: Option<Duration>) -> TimeVal {
    let Some(timeout) = timeout else { return TimeVal::new(0, 0) };
    let timeout = timeout.max(Duration::from_micros(1));
    TimeVal::new(timeout.as_secs().try_into().unwrap_or(i64::MAX), timeout.subsec_micros().into())
}

/// Four packets. Linux gives 208 KiB and one connection carried 4.1 GB/s with that, 6.3 GB/s from 2 MiB on (two
/// cores of an AMD EPYC). TCP grows its own buffers, and a larger one made no difference to it on loopback.
const UNIX_BUFFER_BYTES: usize = 2 << 20;

/// Milliseconds that sent bytes may go unacknowledged, or find no room at the other end: a link that drops everything
/// is an error after this, where Linux alone would try for a quarter of an hour. A target that is slow to take
/// pages must not be cut off, so this is long. The heartbeat on the control connection notices a death sooner.
const UNACKNOWLEDGED_MS_MAX: u32 = 30_000;

/// How to send where nothing can be congested. A system whose default paces (BBR) spends as much time on that as on
/// all the rest of a loopback connection: 0.29 s of CPU a GiB, 0.16 s with this. Every kernel has it.
const UNPACED: &str = "reno";

/// An idle connection is probed after 5 s of silence, every 3 s, and given up after 3 probes: 14 s.
const PROBE_AFTER_S: u32 = 5;
const PROBE_EVERY_S: u32 = 3;
const PROBES: u32 = 3;
