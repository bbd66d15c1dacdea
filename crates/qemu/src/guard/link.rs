//! What whimbrel and its guard say to each other: one JSON object a packet, a descriptor with it where needed.

#![expect(unsafe_code, reason = "a received descriptor is a number until it is owned")]

use nix::cmsg_space;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, recvmsg,
    sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What the guard is asked.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Borrow a userfaultfd of this process.
    Borrow { pid: i32 },
    /// Run the VM on if the link ends.
    Arm { qmp: PathBuf, pid: i32 },
    /// Do nothing if the link ends.
    Disarm,
    /// Disarm and write this to the descriptor that comes along.
    Commit { message: Vec<u8> },
}

impl Request {
    /// A word for error messages.
    pub fn duty(&self) -> &'static str {
        match self {
            Self::Borrow { .. } => "borrowing a userfaultfd",
            Self::Arm { .. } => "arming",
            Self::Disarm => "disarming",
            Self::Commit { .. } => "committing",
        }
    }
}

/// What the guard answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Done,
    /// With the descriptor.
    Borrowed {
        stood_still_ns: u64,
    },
    Failed {
        text: String,
    },
    /// Not a byte of the commit was written.
    Unsent {
        text: String,
    },
}

/// One end of the link. It is closed on exec, so only the two of them hold it.
#[derive(Debug)]
pub(super) struct Link {
    socket: OwnedFd,
}

impl Link {
    /// Two ends.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Ok((Self { socket: ours }, Self { socket: theirs }))
    }

    /// Sends one message.
    pub fn send(&self, message: &impl Serialize, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        assert!(bytes.len() <= MESSAGE_BYTES_MAX, "a message of {} bytes", bytes.len());
        let fds: Vec<RawFd> = fd.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let bytes = [IoSlice::new(&bytes)];
        sendmsg::<UnixAddr>(self.socket.as_raw_fd(), &bytes, control, MsgFlags::MSG_NOSIGNAL, None)?;
        Ok(())
    }

    /// Receives one message with the descriptor that came along; none if the other end is gone.
    pub fn receive<T: DeserializeOwned>(
        &self,
        limit: Option<Duration>,
    ) -> io::Result<Option<(T, Option<OwnedFd>)>> {
        self.wait(limit)?;
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let mut space = cmsg_space!(RawFd);
        let (count, fd) = {
            let mut place = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let message = recvmsg::<UnixAddr>(self.socket.as_raw_fd(), &mut place, Some(&mut space), flags)?;
            let mut fd = None;
            for control in message.cmsgs()? {
                if let ControlMessageOwned::ScmRights(fds) = control {
                    // SAFETY: the kernel just made these descriptors for us; there is room for no more than one.
                    fd = fds.first().map(|&fd| unsafe { OwnedFd::from_raw_fd(fd) });
                }
            }
            (message.bytes, fd)
        };
        if count == 0 {
            return Ok(None);
        }
        Ok(Some((serde_json::from_slice(&bytes[..count])?, fd)))
    }

    fn wait(&self, limit: Option<Duration>) -> io::Result<()> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = left.map_or(PollTimeout::NONE, |left| {
                PollTimeout::try_from(left.as_millis() as i32 + 1).unwrap_or(PollTimeout::MAX)
            });
            match poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(1..) => return Ok(()),
                Ok(_) | Err(nix::errno::Errno::EINTR) if left.is_none_or(|left| !left.is_zero()) => {}
                Ok(_) | Err(nix::errno::Errno::EINTR) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl From<Link> for OwnedFd {
    fn from(link: Link) -> Self {
        link.socket
    }
}

impl From<OwnedFd> for Link {
    fn from(socket: OwnedFd) -> Self {
        Self { socket }
    }
}

/// A commit's bytes take up to four characters each in JSON.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_descriptor_goes_along_and_works_at_the_other_end() {
        let (near, far) = Link::pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        near.send(&Request::Disarm, Some(writer.as_fd())).unwrap();
        drop(writer);
        let (request, fd) = far.receive::<Request>(None).unwrap().unwrap();
        assert!(matches!(request, Request::Disarm));
        std::fs::File::from(fd.unwrap()).write_all(b"here").unwrap();
        let mut text = String::new();
        io::Read::read_to_string(&mut reader, &mut text).unwrap();
        assert_eq!(text, "here");
    }

    #[test]
    fn an_end_that_is_gone_is_no_message_and_silence_is_an_error() {
        let (near, far) = Link::pair().unwrap();
        let silent = far.receive::<Request>(Some(Duration::from_millis(5)));
        assert_eq!(silent.unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(near);
        assert!(far.receive::<Request>(None).unwrap().is_none());
    }

    #[test]
    fn the_longest_commit_fits() {
        let (near, far) = Link::pair().unwrap();
        near.send(&Request::Commit { message: vec![255; super::super::COMMIT_BYTES_MAX] }, None).unwrap();
        let (request, fd) = far.receive::<Request>(None).unwrap().unwrap();
        assert!(fd.is_none());
        assert!(
            matches!(request, Request::Commit { message } if message.len() == super::super::COMMIT_BYTES_MAX)
        );
    }
}
