//! A cheap hint that something was discarded from a file: inotify tells of holes punched and of writes through
//! descriptors, and never of memory that is written through a mapping.

#![expect(unsafe_code, reason = "inotify and a raw read")]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Watches files. What can't be watched counts as always changed.
#[derive(Debug)]
pub(crate) struct Hint {
    fd: Option<OwnedFd>,
}

impl Hint {
    /// Watches these files from now on.
    pub(crate) fn new<'a>(files: impl Iterator<Item = &'a File>) -> Self {
        Self { fd: watch(files).ok() }
    }

    /// Whether a file may have changed since this was last asked.
    pub(crate) fn fired(&mut self) -> bool {
        let Some(fd) = &self.fd else { return true };
        let mut fired = false;
        let mut events = [0u64; 512];
        loop {
            // SAFETY: reads into an array of the size given; the descriptor does not block.
            let read =
                unsafe { libc::read(fd.as_raw_fd(), events.as_mut_ptr().cast(), size_of_val(&events)) };
            if read <= 0 {
                return fired;
            }
            fired = true;
        }
    }
}

fn watch<'a>(files: impl Iterator<Item = &'a File>) -> io::Result<OwnedFd> {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    for file in files {
        // By descriptor: a memfd and a deleted file have no other name.
        let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("no NUL in digits");
        // SAFETY: a string that lives through the call.
        let rc = unsafe { libc::inotify_add_watch(fd.as_raw_fd(), path.as_ptr(), libc::IN_MODIFY) };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(fd)
}
