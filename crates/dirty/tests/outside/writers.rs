//! Who writes the VM's memory, and whether that is seen.

use crate::victim::{HUGE, Kind, Victim};
use crate::watch::{Round, Watch};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

const KINDS: [Kind; 4] = [Kind::Anonymous, Kind::AnonymousHuge, Kind::Memfd, Kind::PrivateFile];

fn filled(kind: Kind) -> Option<Watch> {
    Watch::new(kind, 2 * HUGE, |victim, memory| victim.store(memory.at, memory.bytes, 7))
}

#[test]
fn the_kernel_writing_for_the_process_is_seen() {
    for kind in KINDS {
        let Some(mut watch) = filled(kind) else { continue };
        let fd = watch.victim.call(libc::SYS_memfd_create, &[c"source".as_ptr() as u64, 0]).unwrap();
        watch.victim.call(libc::SYS_ftruncate, &[fd, HUGE]).unwrap();
        let (at, bytes) = (watch.memory.page(20), 4096 * 3);
        assert_eq!(watch.victim.call(libc::SYS_read, &[fd, at, bytes]).unwrap(), bytes);
        assert_eq!(watch.collect(), Round::data([20, 21, 22]), "{kind:?}");
    }
}

#[test]
fn direct_io_into_the_process_is_seen_when_it_is_done_before_the_round() {
    for kind in KINDS {
        let Some(mut watch) = filled(kind) else { continue };
        let mut file = tempfile();
        file.write_all(&[3; 8192]).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let path = format!("/proc/{}/fd/{}\0", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&file));
        // The child reads the path from its own memory.
        let scratch = watch.victim.mmap(0, 4096, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0).unwrap();
        poke(&watch.victim, scratch, path.as_bytes());
        let flags = (libc::O_RDONLY | libc::O_DIRECT) as u64;
        let fd = watch.victim.call(libc::SYS_openat, &[libc::AT_FDCWD as u64, scratch, flags, 0]);
        let Ok(fd) = fd else {
            println!("SKIPPED direct I/O: {} takes none", path.trim_end_matches('\0'));
            return;
        };
        let read = watch.victim.call(libc::SYS_pread64, &[fd, watch.memory.page(20), 8192, 0]).unwrap();
        assert_eq!(read, 8192);
        assert_eq!(watch.collect(), Round::data([20, 21]), "{kind:?}");
        assert_eq!(watch.read(&[21]), [0x0303_0303_0303_0303], "{kind:?}");
    }
}

#[test]
fn another_process_writing_the_memory_of_this_one_is_seen() {
    for kind in KINDS {
        let Some(mut watch) = filled(kind) else { continue };
        poke(&watch.victim, watch.memory.page(20), &[9; 8]);
        assert_eq!(watch.collect(), Round::data([20]), "{kind:?}: process_vm_writev");
        let memory = std::fs::File::options().write(true).open(format!("/proc/{}/mem", watch.victim.pid));
        memory.unwrap().write_all_at(&[9; 8], watch.memory.page(30)).unwrap();
        assert_eq!(watch.collect(), Round::data([30]), "{kind:?}: /proc/PID/mem");
        assert_eq!(watch.read(&[20, 30]), [0x0909_0909_0909_0909; 2], "{kind:?}");
    }
}

/// The limit that makes a second process with the same memory a reason to refuse.
#[test]
fn another_process_writing_the_shared_file_is_not_seen() {
    let Some(mut watch) = filled(Kind::Memfd) else { return };
    let path = format!("/proc/{}/fd/{}", watch.victim.pid, watch.memory.fd.unwrap());
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&[9; 8], 20 * 4096).unwrap();
    assert_eq!(watch.collect(), Round::nothing());
    assert_eq!(watch.read(&[20]), [0x0909_0909_0909_0909]);
}

fn poke(victim: &Victim, at: u64, bytes: &[u8]) {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: the local side is a slice that is only read; the kernel checks the other.
    let written = unsafe { libc::process_vm_writev(victim.pid, &local, 1, &remote, 1, 0) };
    assert_eq!(written, bytes.len() as isize);
}

fn tempfile() -> std::fs::File {
    use std::os::unix::fs::OpenOptionsExt;
    let unnamed =
        std::fs::File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).open("/var/tmp");
    unnamed.expect("a file in /var/tmp")
}
