//! Copies pages from and to the memory of another process, with as few system calls as the kernel allows. Knows
//! addresses, not RAM blocks.

#![expect(unsafe_code, reason = "process_vm_readv and process_vm_writev")]

use crate::PAGE;
use libc::{c_void, iovec};
use std::io;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the process to us.
    Read,
    /// From us to the process.
    Write,
}

/// A copy that ended early.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// Address in the process of the first byte that was not copied.
    pub(crate) at: u64,
    pub(crate) source: io::Error,
}

/// Copies the pages at `remote`, in order, to or from the bytes that start at `local`. Neighbours are one piece.
///
/// # Safety
/// `local` must be good for a page for each of `remote`: writable for [`Way::Read`], readable for [`Way::Write`].
pub(crate) unsafe fn copy(
    pid: i32,
    way: Way,
    remote: impl IntoIterator<Item = u64>,
    local: *mut u8,
) -> Result<(), Stopped> {
    let mut pieces = Pieces { pid, way, local, list: [EMPTY; PIECES], used: 0 };
    for address in remote {
        if !pieces.grow(address) {
            if pieces.used == PIECES {
                pieces.flush()?;
            }
            pieces.list[pieces.used] = piece(address, PAGE);
            pieces.used += 1;
        }
    }
    pieces.flush()
}

/// Writes zeros over `pages` pages of the process from `address`.
pub(crate) fn blank(pid: i32, address: u64, pages: u64) -> Result<(), Stopped> {
    let mut left = pages;
    while left > 0 {
        let count = left.min(ZERO_PAGES as u64);
        let first = address + (pages - left) * PAGE as u64;
        let remote = (0..count).map(|at| first + at * PAGE as u64);
        // SAFETY: at most as many pages as ZEROS has, and they are only read.
        unsafe { copy(pid, Way::Write, remote, ZEROS.0.as_ptr().cast_mut())? };
        left -= count;
    }
    Ok(())
}

struct Pieces {
    pid: i32,
    way: Way,
    local: *mut u8,
    list: [iovec; PIECES],
    used: usize,
}

impl Pieces {
    /// Makes the last piece a page longer if `address` follows it.
    fn grow(&mut self, address: u64) -> bool {
        match self.list[..self.used].last_mut() {
            Some(last) if last.iov_base as u64 + last.iov_len as u64 == address => {
                last.iov_len += PAGE;
                true
            }
            _ => false,
        }
    }

    /// Copies every piece. The kernel may stop anywhere; only a call that copies nothing is a failure.
    fn flush(&mut self) -> Result<(), Stopped> {
        let mut at = 0;
        while at < self.used {
            let mut done = self.call(at)?;
            // SAFETY: the kernel copied `done` bytes, so they lie inside what the caller of `copy` promised.
            self.local = unsafe { self.local.add(done) };
            while at < self.used && done >= self.list[at].iov_len {
                done -= self.list[at].iov_len;
                at += 1;
            }
            if done > 0 {
                let rest = &mut self.list[at];
                *rest = piece(rest.iov_base as u64 + done as u64, rest.iov_len - done);
            }
        }
        self.used = 0;
        Ok(())
    }

    fn call(&self, from: usize) -> Result<usize, Stopped> {
        let remote = &self.list[from..self.used];
        let bytes = remote.iter().map(|piece| piece.iov_len).sum();
        let local = iovec { iov_base: self.local.cast(), iov_len: bytes };
        let count = remote.len() as u64;
        // SAFETY: `local` is good for `bytes` by the promise of `copy`; the remote side is checked by the kernel.
        let done = unsafe {
            match self.way {
                Way::Read => libc::process_vm_readv(self.pid, &local, 1, remote.as_ptr(), count, 0),
                Way::Write => libc::process_vm_writev(self.pid, &local, 1, remote.as_ptr(), count, 0),
            }
        };
        match usize::try_from(done) {
            Ok(done) if done > 0 => Ok(done),
            Ok(_) => Err(self.stopped(from, io::Error::from_raw_os_error(libc::EFAULT))),
            Err(_) => Err(self.stopped(from, io::Error::last_os_error())),
        }
    }

    fn stopped(&self, from: usize, source: io::Error) -> Stopped {
        Stopped { at: self.list[from].iov_base as u64, source }
    }
}

fn piece(address: u64, bytes: usize) -> iovec {
    iovec { iov_base: address as usize as *mut c_void, iov_len: bytes }
}

const EMPTY: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// A packet of 512 KiB has at most 128 pieces; the kernel takes 1024 (UIO_MAXIOV).
const PIECES: usize = 256;

const ZERO_PAGES: usize = 16;

#[repr(align(4096))]
struct Zeros([u8; ZERO_PAGES * PAGE]);

static ZEROS: Zeros = Zeros([0; ZERO_PAGES * PAGE]);
