//! What `/proc` and a pidfd say of a process. Knows nothing of QEMU.

#![expect(unsafe_code, reason = "pidfd_open and pidfd_getfd have no safe wrapper")]

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A process, held by a descriptor so that its number can't come to mean another one unnoticed.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    fd: OwnedFd,
}

impl Process {
    /// Fails with `ESRCH` if there is no such process.
    pub fn open(pid: i32) -> io::Result<Self> {
        // SAFETY: takes two numbers, returns a new descriptor or -1.
        let fd = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
        Ok(Self { pid, fd })
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether it has ended (it may still be a zombie).
    pub fn has_ended(&self) -> bool {
        let mut fds = [nix::poll::PollFd::new(self.fd.as_fd(), nix::poll::PollFlags::POLLIN)];
        matches!(nix::poll::poll(&mut fds, nix::poll::PollTimeout::ZERO), Ok(1..))
    }

    /// A copy of its descriptor `fd`, referring to the same open file. Needs the right to trace it.
    pub fn copy_fd(&self, fd: RawFd) -> io::Result<OwnedFd> {
        // SAFETY: takes three numbers, returns a new descriptor (close-on-exec) or -1.
        owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.fd.as_raw_fd(), fd, 0) })
    }
}

fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the system call just made this descriptor, nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(result as RawFd) })
}

/// Copies bytes out of a process's memory. Fails if not all of them can be read.
pub fn read_memory(pid: i32, address: u64, into: &mut [u8]) -> io::Result<()> {
    let bytes = into.len();
    let remote = [RemoteIoVec { base: address as usize, len: bytes }];
    match process_vm_readv(Pid::from_raw(pid), &mut [IoSliceMut::new(into)], &remote)? {
        count if count == bytes => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// The short name of a process or thread, or "?" if it is gone.
pub fn name(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).map_or("?".into(), |name| name.trim().to_owned())
}

/// A field of `/proc/PID/status`, such as `TracerPid`.
pub fn status_field(pid: i32, field: &str) -> io::Result<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.map(|value| value.trim().to_owned()).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The process that traces `pid`, if any.
pub fn tracer(pid: i32) -> io::Result<Option<i32>> {
    let tracer = status_field(pid, "TracerPid")?;
    Ok(tracer.parse().ok().filter(|&tracer| tracer != 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_that_ended_is_seen_to_have_ended() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::open(child.id() as i32).unwrap();
        assert!(!process.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let own = std::process::id() as i32;
        assert_eq!(status_field(own, "Pid").unwrap(), own.to_string());
        assert!(status_field(own, "Pi").is_err());
        assert_eq!(tracer(own).unwrap(), None);
    }
}
