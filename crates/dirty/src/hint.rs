//! A cheap hint that something was discarded from a file: inotify tells of holes punched and of writes through
//! descriptors, and never of memory that is written through a mapping.

#![expect(unsafe_code, reason = "inotify and a raw read")]

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// Watches the file behind a region. A file that can't be watched counts as always changed.
#[derive(Debug)]
pub(crate) struct Hint {
    inotify: Option<OwnedFd>,
}

impl Hint {
    /// Watches a file from now on; `name` is its path as `/proc/PID/maps` has it.
    pub(crate) fn new(file: &File, name: &str) -> Self {
        Self { inotify: if is_named(file, name) { watch(file).ok() } else { None } }
    }

    /// For memory without a file.
    pub(crate) fn none() -> Self {
        Self { inotify: None }
    }

    /// Whether the file may have changed since this was last asked.
    pub(crate) fn fired(&self) -> bool {
        let Some(inotify) = &self.inotify else { return true };
        let mut fired = false;
        let mut events = [0u64; 512];
        loop {
            let (at, bytes) = (events.as_mut_ptr().cast(), size_of_val(&events));
            // SAFETY: reads into an array of the size given; the descriptor does not block.
            let read = unsafe { libc::read(inotify.as_raw_fd(), at, bytes) };
            if read <= 0 {
                return fired;
            }
            fired = true;
        }
    }
}

/// Whether the file was opened by its name. Since Linux 6.14 what is done through a descriptor that the kernel
/// made itself (memfd, shared anonymous memory) is not told to anyone, and nothing shows that from outside.
fn is_named(file: &File, name: &str) -> bool {
    let (Ok(file), Ok(named)) = (file.metadata(), fs::metadata(name)) else { return false };
    (file.dev(), file.ino()) == (named.dev(), named.ino())
}

fn watch(file: &File) -> io::Result<OwnedFd> {
    // SAFETY: a system call without pointers.
    let inotify = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
    if inotify < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    let inotify = unsafe { OwnedFd::from_raw_fd(inotify) };
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("no NUL in digits");
    // SAFETY: a string that lives through the call.
    let rc = unsafe { libc::inotify_add_watch(inotify.as_raw_fd(), path.as_ptr(), libc::IN_MODIFY) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(inotify) }
}
