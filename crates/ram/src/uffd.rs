//! `userfaultfd` in asynchronous write-protect mode: the kernel notes writes by itself and sends no message, so
//! nobody ever waits for us. Knows addresses, not RAM blocks.

#![expect(unsafe_code, reason = "ioctls that take pointers, and a system call without a wrapper")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A descriptor that watches memory of one process: ours, or the one it was made in. When its last copy closes,
/// the kernel ends all protection that came of it.
#[derive(Debug)]
pub struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// One for our own memory.
    pub fn own() -> io::Result<Self> {
        // SAFETY: a system call without pointers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor for us.
        Self::new(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    /// Takes a fresh descriptor and agrees on asynchronous write protection with the kernel. Fails with EINVAL
    /// where the kernel doesn't have it (before 6.7; arm64 before 6.10).
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let uffd = Self { fd };
        uffd.call(UFFDIO_API, &mut Api { api: 0xaa, features: FEATURES, ioctls: 0 })?;
        Ok(uffd)
    }

    /// Registers a range, which must start and end on pages of its backing. Writes to it are noted once it is
    /// protected. Fails with EBUSY if it is registered elsewhere.
    pub fn register(&self, range: Range<u64>) -> io::Result<()> {
        let (start, len) = (range.start, range.end - range.start);
        self.call(UFFDIO_REGISTER, &mut Register { start, len, mode: REGISTER_WP, ioctls: 0 })
    }

    /// Protects a range of hugetlb memory, holes too. Other memory is better protected by a scan, which leaves
    /// huge pages whole.
    pub fn protect(&self, range: Range<u64>) -> io::Result<()> {
        let (start, len) = (range.start, range.end - range.start);
        self.call(UFFDIO_WRITEPROTECT, &mut Protect { start, len, mode: PROTECT_WP })
    }

    fn call<T>(&self, request: u32, arg: &mut T) -> io::Result<()> {
        // SAFETY: `arg` is the structure that the request takes, by the callers above.
        let rc = unsafe { libc::ioctl(self.fd.as_raw_fd(), request as libc::Ioctl, arg as *mut T) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Protect {
    start: u64,
    len: u64,
    mode: u64,
}

/// `UFFD_USER_MODE_ONLY`: what an unprivileged process may have. In asynchronous mode it restricts nothing.
const USER_MODE_ONLY: i32 = 1;

/// PAGEFAULT_FLAG_WP, WP_HUGETLBFS_SHMEM, WP_UNPOPULATED, WP_ASYNC (include/uapi/linux/userfaultfd.h).
const FEATURES: u64 = 1 | 1 << 12 | 1 << 13 | 1 << 15;

const REGISTER_WP: u64 = 2;
const PROTECT_WP: u64 = 1;

// Type 0xaa; sizes 24, 32 and 24; equal on x86-64 and arm64.
const UFFDIO_API: u32 = 0xc018_aa3f;
const UFFDIO_REGISTER: u32 = 0xc020_aa00;
const UFFDIO_WRITEPROTECT: u32 = 0xc018_aa06;
