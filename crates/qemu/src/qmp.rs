//! A QMP client over a Unix socket: commands with a time limit, events kept aside, descriptors passed along.
//! Knows the protocol, not what any command means.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::{
    self, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sockopt,
};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a command may take unless its caller knows better. A main loop that answers later has a problem.
pub const LIMIT: Duration = Duration::from_secs(5);

/// A connection to a QEMU's monitor, past the greeting. QEMU serves one client a socket at a time.
#[derive(Debug)]
pub struct Qmp {
    socket: OwnedFd,
    path: PathBuf,
    received: Vec<u8>,
    events: VecDeque<Event>,
    sent_count: u64,
    greeting: Value,
    peer_pid: i32,
}

/// Something QEMU said unasked, such as `STOP` or `SHUTDOWN`.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name in capitals.
    pub name: String,
    /// What came with it; null if nothing did.
    pub data: Value,
}

impl Qmp {
    /// Connects and negotiates within `limit`. A monitor that another client holds accepts and then stays
    /// silent: that is [`QmpError::Silent`].
    pub fn connect(path: &Path, limit: Duration) -> Result<Self, QmpError> {
        let deadline = Instant::now() + limit;
        let socket = dial(path, deadline)?;
        let peer = socket::getsockopt(&socket, sockopt::PeerCredentials)
            .map_err(|error| QmpError::Connect { path: path.into(), source: error.into() })?;
        let mut qmp = Self {
            socket,
            path: path.into(),
            received: Vec::new(),
            events: VecDeque::new(),
            sent_count: 0,
            greeting: Value::Null,
            peer_pid: peer.pid(),
        };
        qmp.greeting = qmp.greet(deadline, limit)?;
        qmp.execute_within(
            "qmp_capabilities",
            json!({}),
            deadline.saturating_duration_since(Instant::now()),
        )?;
        Ok(qmp)
    }

    /// What QEMU said first: its version and capabilities.
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// The process that listens on the socket, as the kernel noted it; 0 if it is in a PID namespace we can't see.
    pub fn peer_pid(&self) -> i32 {
        self.peer_pid
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs a command and returns what it returns, within [`LIMIT`].
    pub fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, LIMIT)
    }

    /// Runs a command within `limit`. After [`QmpError::Late`] QEMU may still carry it out; its answer is then
    /// dropped when it comes, and the connection can be used on.
    pub fn execute_within(
        &mut self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        self.run(command, arguments, None, limit)
    }

    /// Runs a command that takes a descriptor along (`getfd`, `add-fd`), within [`LIMIT`].
    pub fn execute_with_fd(
        &mut self,
        command: &'static str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        self.run(command, arguments, Some(fd), LIMIT)
    }

    /// Runs a line of the human monitor and returns its text.
    pub fn human(&mut self, line: &str) -> Result<String, QmpError> {
        let command = "human-monitor-command";
        match self.execute(command, json!({ "command-line": line }))? {
            Value::String(text) => Ok(text),
            other => Err(QmpError::Answer { command, text: other.to_string() }),
        }
    }

    /// The events that have come since the last call, oldest first; does not wait.
    pub fn events(&mut self) -> Result<Vec<Event>, QmpError> {
        const WAITING: &str = "(waiting for events)";
        while let Some(message) = self.message_by(WAITING, Instant::now())? {
            self.keep_event(message);
        }
        Ok(self.events.drain(..).collect())
    }

    fn greet(&mut self, deadline: Instant, limit: Duration) -> Result<Value, QmpError> {
        const GREETING: &str = "(greeting)";
        let path = self.path.clone();
        match self.message_by(GREETING, deadline) {
            Ok(Some(message)) => match message.get("QMP") {
                Some(greeting) => Ok(greeting.clone()),
                None => Err(QmpError::NotQmp { path, text: clip(&message.to_string()) }),
            },
            Ok(None) => Err(QmpError::Silent { path, limit }),
            // A QEMU that is just ending takes a connection from its backlog and hangs up.
            Err(QmpError::Closed { .. }) => Err(QmpError::HungUp { path }),
            Err(other) => Err(other),
        }
    }

    fn run(
        &mut self,
        command: &'static str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        let deadline = Instant::now() + limit;
        self.sent_count += 1;
        let id = self.sent_count;
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        self.send(command, line.as_bytes(), fd, deadline, limit)?;
        loop {
            let late = || QmpError::Late { command, limit };
            let message = self.message_by(command, deadline)?.ok_or_else(late)?;
            if let Some(answer) = answer_to(command, id, &message) {
                return answer;
            }
            self.keep_event(message);
        }
    }

    fn send(
        &mut self,
        command: &'static str,
        mut bytes: &[u8],
        mut fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
        limit: Duration,
    ) -> Result<(), QmpError> {
        while !bytes.is_empty() {
            match send_some(self.socket.as_fd(), bytes, fd) {
                Ok(count) => {
                    bytes = &bytes[count..];
                    fd = None;
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    if !ready(self.socket.as_fd(), PollFlags::POLLOUT, deadline) {
                        return Err(QmpError::Late { command, limit });
                    }
                }
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(QmpError::Closed { command }),
                Err(error) => return Err(QmpError::Io { command, source: error.into() }),
            }
        }
        Ok(())
    }

    /// The next message, or none when `deadline` passes first.
    fn message_by(&mut self, command: &'static str, deadline: Instant) -> Result<Option<Value>, QmpError> {
        let mut searched_bytes = 0;
        loop {
            if let Some(end) = self.received[searched_bytes..].iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=searched_bytes + end).collect();
                if line.trim_ascii().is_empty() {
                    searched_bytes = 0;
                    continue;
                }
                let text = || clip(&String::from_utf8_lossy(&line));
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|_| QmpError::Answer { command, text: text() });
            }
            searched_bytes = self.received.len();
            if searched_bytes > LINE_BYTES_MAX {
                return Err(QmpError::TooLong { command });
            }
            if !self.receive(command)? && !ready(self.socket.as_fd(), PollFlags::POLLIN, deadline) {
                return Ok(None);
            }
        }
    }

    /// Takes what has arrived; false if nothing has.
    fn receive(&mut self, command: &'static str) -> Result<bool, QmpError> {
        let mut chunk = [0; 16 << 10];
        match socket::recv(self.socket.as_raw_fd(), &mut chunk, MsgFlags::empty()) {
            Ok(0) | Err(Errno::ECONNRESET) => Err(QmpError::Closed { command }),
            Ok(count) => {
                self.received.extend_from_slice(&chunk[..count]);
                Ok(true)
            }
            Err(Errno::EINTR) => Ok(true),
            Err(Errno::EAGAIN) => Ok(false),
            Err(error) => Err(QmpError::Io { command, source: error.into() }),
        }
    }

    fn keep_event(&mut self, message: Value) {
        let Some(name) = message["event"].as_str() else { return };
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(Event { name: name.into(), data: message["data"].clone() });
    }
}

/// The answer in `message`, if it is one to command number `id`.
fn answer_to(command: &'static str, id: u64, message: &Value) -> Option<Result<Value, QmpError>> {
    // What QEMU can't parse it answers without an id, and we have one command under way.
    let ours = message.get("id").is_none_or(|there| there == &json!(id));
    if let Some(error) = message.get("error").filter(|_| ours) {
        let text = error["desc"].as_str().unwrap_or("no reason given").to_owned();
        let class = error["class"].as_str().unwrap_or_default().to_owned();
        return Some(Err(QmpError::Refused { command, class, text }));
    }
    message.get("return").filter(|_| ours).map(|value| Ok(value.clone()))
}

fn dial(path: &Path, deadline: Instant) -> Result<OwnedFd, QmpError> {
    let failed = |errno: Errno| QmpError::Connect { path: path.into(), source: errno.into() };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None).map_err(failed)?;
    let address = UnixAddr::new(path).map_err(failed)?;
    loop {
        match socket::connect(socket.as_raw_fd(), &address) {
            Ok(()) => return Ok(socket),
            // QEMU listens with a backlog of one; it is full while two others wait.
            Err(Errno::EAGAIN) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

fn send_some(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> nix::Result<usize> {
    let fds: Vec<RawFd> = fd.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let control = if fds.is_empty() { &[][..] } else { &rights[..] };
    socket::sendmsg::<UnixAddr>(
        socket.as_raw_fd(),
        &[IoSlice::new(bytes)],
        control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )
}

/// Waits until `socket` is ready, or returns false once `deadline` has passed.
fn ready(socket: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return false;
    }
    // Rounded up, or the last fraction of a millisecond would be spent spinning.
    let timeout = PollTimeout::try_from(left.as_millis() as i32 + 1).unwrap_or(PollTimeout::MAX);
    let mut fds = [PollFd::new(socket, flags)];
    // A failed or interrupted poll says nothing: the read or write that follows finds out.
    let _ = nix::poll::poll(&mut fds, timeout);
    true
}

/// A text short enough for one line of an error.
fn clip(text: &str) -> String {
    text.trim().chars().take(200).collect()
}

/// Why a monitor could not be asked.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum QmpError {
    #[error(
        "cannot connect to the QMP socket {path}: is this QEMU running, with -qmp unix:{path},server=on,wait=off?"
    )]
    Connect { path: PathBuf, source: io::Error },
    #[error(
        "the QMP socket {path} accepted but sent no greeting in {limit:?}: another client holds this monitor \
         (QEMU serves one at a time). Close it, or give QEMU a second -qmp socket"
    )]
    Silent { path: PathBuf, limit: Duration },
    #[error("QEMU closed the QMP socket {path} without a greeting")]
    HungUp { path: PathBuf },
    #[error("{path} is not a QMP socket; it said {text:?}")]
    NotQmp { path: PathBuf, text: String },
    #[error("QEMU refused {command}: {text}")]
    Refused { command: &'static str, class: String, text: String },
    #[error("QEMU did not answer {command} in {limit:?}")]
    Late { command: &'static str, limit: Duration },
    #[error("QEMU ended or closed the monitor during {command}")]
    Closed { command: &'static str },
    #[error("QEMU answered {command} with a line of more than {LINE_BYTES_MAX} bytes")]
    TooLong { command: &'static str },
    #[error("QEMU answered {command} with {text}, which was not expected")]
    Answer { command: &'static str, text: String },
    #[error("the QMP connection failed during {command}")]
    Io { command: &'static str, source: io::Error },
}

impl QmpError {
    /// Whether QEMU carried nothing out because it knows no such command or argument.
    pub fn is_unknown(&self) -> bool {
        match self {
            Self::Refused { class, text, .. } => class == "CommandNotFound" || text.contains("is unexpected"),
            _ => false,
        }
    }
}

/// `query-qmp-schema` is the longest answer known, at 0.2 MiB.
const LINE_BYTES_MAX: usize = 16 << 20;

/// Events nobody asked for are dropped from here on, oldest first.
const EVENTS_MAX: usize = 1024;
