//! Waiting for a source to connect.

use crate::stream::wait_for;
use crate::unix::{BACKLOG, SocketFile, bind_file};
use crate::{Address, ChannelError, Stream};
use nix::poll::PollFlags;
use nix::sys::socket::{Backlog, Shutdown, listen, shutdown};
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A place that sources can connect to.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    address: Address,
    closed: AtomicBool,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix { listener: UnixListener, _file: SocketFile },
}

impl Listener {
    /// Listens on an address; port 0 lets the kernel choose. The file of a Unix socket is for this user alone,
    /// takes the place of one that nobody listens on any more, and goes when the listener goes.
    pub fn bind(address: &Address) -> Result<Self, ChannelError> {
        let failed = |source| ChannelError::Listen { address: address.clone(), source };
        let listener = match address {
            Address::Tcp { host, port } => {
                let places = (host.as_str(), *port).to_socket_addrs();
                let places: Vec<_> = places
                    .map_err(|source| ChannelError::Resolve { address: address.clone(), source })?
                    .collect();
                bind_tcp(&places).map_err(failed)?
            }
            Address::Unix { path } => {
                let (listener, file) = bind_file(path).map_err(failed)?;
                Self {
                    socket: Socket::Unix { listener: listener.into(), _file: file },
                    address: address.clone(),
                    closed: AtomicBool::new(false),
                }
            }
        };
        listener.set_nonblocking().map_err(failed)?;
        Ok(listener)
    }

    /// Where it really listens: with the port that the kernel chose, and the IP address for a name.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Waits for the next connection, none if nobody comes in time. What it will say is up to [`Stream::caller`].
    pub fn accept(&self, timeout: Duration) -> Result<Option<Stream>, ChannelError> {
        let failed = |source| ChannelError::Accept { address: self.address.clone(), source };
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if !wait_for(self.as_fd(), PollFlags::POLLIN, left).map_err(failed)? {
                return Ok(None);
            }
            if self.closed.load(Relaxed) {
                return Err(failed(io::ErrorKind::NotConnected.into()));
            }
            match self.accept_now() {
                Ok(stream) => return Ok(Some(stream)),
                Err(error) if is_callers_fault(&error) => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// Accepts nobody any more. Who waits in [`Listener::accept`] wakes with an error.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
        // Wakes `poll`. Fails only for a socket that does not listen.
        let _ = shutdown(self.as_fd().as_raw_fd(), Shutdown::Both);
    }

    fn accept_now(&self) -> io::Result<Stream> {
        match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, from) = listener.accept()?;
                Stream::tcp(stream.into(), Address::from(from).to_string())
            }
            Socket::Unix { listener, .. } => {
                let (stream, _) = listener.accept()?;
                Stream::unix(stream.into(), self.address.to_string())
            }
        }
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        match &self.socket {
            Socket::Tcp(listener) => listener.set_nonblocking(true),
            Socket::Unix { listener, .. } => listener.set_nonblocking(true),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Tcp(listener) => listener.as_fd(),
            Socket::Unix { listener, .. } => listener.as_fd(),
        }
    }
}

fn bind_tcp(places: &[std::net::SocketAddr]) -> io::Result<Listener> {
    let listener = TcpListener::bind(places)?;
    // std's backlog of 128 drops some of 255 channels that dial at once, to try again a second later.
    listen(&listener, Backlog::new(BACKLOG)?)?;
    let address = listener.local_addr()?.into();
    Ok(Listener { socket: Socket::Tcp(listener), address, closed: AtomicBool::new(false) })
}

/// Whether a connection was lost between the kernel and us, which is no reason to stop listening (accept(2)).
fn is_callers_fault(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | WouldBlock)
        || matches!(
            error.raw_os_error(),
            Some(libc::EPROTO | libc::ENETDOWN | libc::EHOSTUNREACH | libc::ENETUNREACH)
        )
}
