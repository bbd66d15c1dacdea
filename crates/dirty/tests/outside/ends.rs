//! How tracking ends: by us, with no trace, or by the VM's process.

use crate::victim::{HUGE, Kind, Victim};
use crate::watch::Watch;
use dirty::DirtyError;
use std::time::{Duration, Instant};

fn filled(kind: Kind) -> Option<Watch> {
    Watch::new(kind, 4 * HUGE, |victim, memory| victim.store(memory.at, memory.bytes, 7))
}

/// Whether memory of the child is registered for write protection with a userfaultfd.
fn registered(victim: &Victim) -> bool {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", victim.pid)).unwrap();
    smaps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" uw"))
}

#[test]
fn dropping_the_tracker_leaves_no_trace() {
    for kind in Kind::ALL {
        let Some(mut watch) = filled(kind) else { continue };
        watch.store(3, 1, 8);
        watch.collect();
        assert!(registered(&watch.victim), "{kind:?}");
        let Watch { tracker, ram, memory, victim, .. } = watch;
        drop(tracker);
        drop(ram);
        // A child that another test forks just now has copies of our descriptors until it closes them.
        let patience = Instant::now() + Duration::from_secs(5);
        while registered(&victim) {
            assert!(Instant::now() < patience, "{kind:?}: still registered");
        }
        victim.store(memory.at, memory.bytes, 9);
        assert_eq!(victim.load(memory.at, memory.bytes), 9 * memory.pages(), "{kind:?}");
    }
}

#[test]
fn a_process_that_ended_is_gone_in_every_call() {
    for kind in Kind::ALL {
        let Some(mut watch) = filled(kind) else { continue };
        let pid = watch.victim.pid;
        watch.victim.kill();
        let error = watch.try_collect().unwrap_err();
        assert!(matches!(error, DirtyError::Gone { pid: gone } if gone == pid), "{kind:?}: {error}");
        let error = dirty::Tracker::arm(&mut watch.tracker).unwrap_err();
        assert!(matches!(error, DirtyError::Gone { .. }), "{kind:?}: {error}");
    }
}

#[test]
fn a_process_that_ended_and_was_not_waited_for_is_gone() {
    for kind in [Kind::Anonymous, Kind::Memfd, Kind::Hugetlb] {
        let Some(mut watch) = filled(kind) else { continue };
        // SAFETY: our own child; `waitid` with WNOWAIT leaves it a zombie.
        unsafe {
            libc::kill(watch.victim.pid, libc::SIGKILL);
            let mut info = std::mem::zeroed();
            libc::waitid(libc::P_PID, watch.victim.pid as u32, &mut info, libc::WEXITED | libc::WNOWAIT);
        }
        let error = watch.try_collect().unwrap_err();
        assert!(matches!(error, DirtyError::Gone { .. }), "{kind:?}: {error}");
    }
}

#[test]
fn a_process_that_runs_another_program_is_an_error() {
    for kind in [Kind::Anonymous, Kind::Memfd] {
        let Some(mut watch) = filled(kind) else { continue };
        // A program that waits for ever and needs no arguments: the child is killed when the test ends.
        let arguments = watch.victim.mmap(0, 4096, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0).unwrap();
        watch.victim.store(arguments, 8, c"/bin/sleep".as_ptr() as u64);
        watch.victim.store(arguments + 8, 8, c"60".as_ptr() as u64);
        watch.victim.exec(c"/bin/sleep", arguments);
        let error = watch.try_collect().unwrap_err();
        let told = matches!(error, DirtyError::Gone { .. } | DirtyError::Unmapped { .. });
        assert!(told, "{kind:?}: {error}");
    }
}
