//! Borrows a userfaultfd: stops one thread of a process as it enters a system call, lets it make one and close
//! its own copy, and sends it on as if nothing had happened. Must run in the guard, which nobody kills.
//!
//! The place is chosen so that there is nothing to guess: a thread that is about to enter a system call has all
//! its state in registers that we can read, and enters the same call again when put back before the instruction.
//! What an interrupted call owes the thread (a restart, a rest of a timeout, `EINTR`) the kernel settles itself
//! on the way to that place.

#[cfg(target_arch = "aarch64")]
#[path = "attach/aarch64.rs"]
mod arch;
#[cfg(target_arch = "x86_64")]
#[path = "attach/x86_64.rs"]
mod arch;
mod seccomp;
mod tracee;

use crate::faults;
use crate::process::{self, Process};
use arch::Registers;
use seccomp::{Call, Verdict};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use tracee::{Moment, Stop, Tracee};

/// A userfaultfd of another process's memory.
#[derive(Debug)]
pub(crate) struct Borrowed {
    /// The descriptor. That process holds no copy.
    pub fd: OwnedFd,
    /// How long the thread that made it stood still.
    pub stood_still: Duration,
}

/// Borrows a userfaultfd from process `pid`: from its main thread, or from another if that one makes no system
/// call for a while.
pub(crate) fn borrow_userfaultfd(pid: i32) -> Result<Borrowed, AttachError> {
    let process = Process::open(pid).map_err(|source| AttachError::Gone { pid, source })?;
    refuse_traced(pid)?;
    let deadline = Instant::now() + BORROW_LIMIT;
    let mut outcome = Err(AttachError::NoCall { pid });
    for thread in threads(pid)? {
        // A thread each: the kernel lets a tracee go when the thread that traces it ends, whatever it ran into.
        outcome = std::thread::scope(|scope| {
            scope.spawn(|| borrow_from(&process, thread)).join().expect("the injection does not panic")
        });
        if !matches!(outcome, Err(AttachError::NoCall { .. })) || Instant::now() >= deadline {
            break;
        }
    }
    outcome
}

/// The threads of a process, the main thread first.
fn threads(pid: i32) -> Result<Vec<i32>, AttachError> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task"));
    let entries = entries.map_err(|source| AttachError::Gone { pid, source })?;
    let mut threads: Vec<i32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    threads.sort_by_key(|&thread| (thread != pid, thread));
    Ok(threads)
}

fn borrow_from(process: &Process, thread: i32) -> Result<Borrowed, AttachError> {
    let pid = process.pid();
    faults::point(1);
    let tracee = Tracee::seize(thread).map_err(|source| refusal(pid, source))?;
    faults::point(2);
    let entered = enter_a_call(&tracee, pid)?;
    let result = inject(process, tracee, &entered.at);
    let stood_still = entered.stood_still + entered.since.elapsed();
    faults::point(13);
    Ok(Borrowed { fd: result?, stood_still })
}

/// A thread that is stopped at the entry of a system call.
struct Entered {
    at: Registers,
    since: Instant,
    /// How long it was stopped on the way there.
    stood_still: Duration,
}

/// Stops the thread where it next enters a system call. One that sleeps in a call is woken and enters it again.
/// Changes nothing: on an error the kernel lets the thread go as it is.
fn enter_a_call(tracee: &Tracee, pid: i32) -> Result<Entered, AttachError> {
    let failed = |source| AttachError::Trace { pid, source };
    let deadline = Instant::now() + CALL_LIMIT;
    let mut stood_still = Duration::ZERO;
    tracee.interrupt().map_err(failed)?;
    faults::point(3);
    loop {
        let Some(stop) = tracee.wait_until(deadline).map_err(failed)? else {
            return Err(AttachError::NoCall { pid });
        };
        let since = Instant::now();
        let signal = match stop {
            Stop::Ended => return Err(AttachError::ended(pid)),
            Stop::Call => {
                if let Moment::Entry { arch } = tracee.moment().map_err(failed)? {
                    let at = Registers::read(tracee).map_err(failed)?;
                    check_place(pid, arch, &at)?;
                    check_filters(pid, tracee, &at)?;
                    return Ok(Entered { at, since, stood_still });
                }
                0
            }
            Stop::Signal(signal) => signal,
            // Our own interruption, or a group stop, which the thread takes up again when we let it go.
            Stop::Other => 0,
        };
        faults::point(4);
        stood_still += since.elapsed();
        tracee.resume(signal).map_err(failed)?;
    }
}

/// Refuses a thread whose system call instruction is not the one we know how to go back to.
fn check_place(pid: i32, arch: u32, at: &Registers) -> Result<(), AttachError> {
    let mut found = vec![0; arch::CALL_INSTRUCTION.len()];
    process::read_memory(pid, at.instruction(), &mut found)
        .map_err(|source| AttachError::Trace { pid, source })?;
    if arch != arch::AUDIT_ARCH || found != arch::CALL_INSTRUCTION {
        return Err(AttachError::Architecture { pid, arch, found });
    }
    Ok(())
}

/// Refuses a thread whose seccomp filters do not let our calls pass: they might kill the process for it.
fn check_filters(pid: i32, tracee: &Tracee, at: &Registers) -> Result<(), AttachError> {
    let mode = process::status_field(tracee.thread(), "Seccomp");
    let mode = mode.map_err(|source| AttachError::Trace { pid, source })?;
    if mode == "0" {
        return Ok(());
    }
    for (number, argument) in [(libc::SYS_userfaultfd, USERFAULTFD_FLAGS), (libc::SYS_close, 0)] {
        let number = number as i32;
        let call = Call { number, arch: arch::AUDIT_ARCH, instruction: at.instruction(), argument };
        match seccomp::verdict(tracee, &call) {
            Ok(Verdict::Allowed) if mode == "2" => {}
            Ok(Verdict::Failed) => {
                return Err(AttachError::Denied { pid, source: io::Error::from_raw_os_error(libc::EPERM) });
            }
            Ok(_) => return Err(AttachError::Deadly { pid, number }),
            Err(source) => return Err(AttachError::Filters { pid, source }),
        }
    }
    Ok(())
}

/// Runs two system calls of ours in the stopped thread, puts it back to where it was, and lets it go. From the
/// first change to the last there is no way out but forward; the thread's end is the only error on the way.
fn inject(process: &Process, tracee: Tracee, at: &Registers) -> Result<OwnedFd, AttachError> {
    let failed = |source| AttachError::Trace { pid: process.pid(), source };
    faults::point(5);
    let policy = tracee.hurry();
    let mask = tracee.signal_mask().map_err(failed)?;
    // A signal handler must not run on registers of ours.
    tracee.set_signal_mask(u64::MAX).map_err(failed)?;
    faults::point(6);
    let made = make_and_close(process, &tracee, at);
    faults::point(11);
    let restored = at.back_to_repeat().write(&tracee);
    let unmasked = tracee.set_signal_mask(mask);
    policy.inspect(|&policy| tracee.calm(policy));
    faults::point(12);
    let detached = tracee.detach();
    let fd = made?;
    restored.and(unmasked).and(detached).map_err(failed)?;
    Ok(fd)
}

fn make_and_close(process: &Process, tracee: &Tracee, at: &Registers) -> Result<OwnedFd, AttachError> {
    let pid = process.pid();
    let failed = |source| AttachError::Trace { pid, source };
    at.entering(libc::SYS_userfaultfd, USERFAULTFD_FLAGS).write(tracee).map_err(failed)?;
    faults::point(7);
    let theirs = run_call(tracee, pid)?;
    faults::point(8);
    if theirs < 0 {
        return Err(AttachError::Denied { pid, source: io::Error::from_raw_os_error(-theirs as i32) });
    }
    let link = std::fs::read_link(format!("/proc/{pid}/fd/{theirs}"));
    if link.is_ok_and(|link| link.as_os_str() != "anon_inode:[userfaultfd]") {
        // A filter answered in the kernel's place. What it named is not ours to close.
        return Err(AttachError::Filtered { pid, answer: theirs });
    }
    let copy = process.copy_fd(theirs as i32).map_err(|source| AttachError::Copy { pid, source });
    faults::point(9);
    at.back_to(libc::SYS_close, theirs as u64).write(tracee).map_err(failed)?;
    run_to(tracee, pid, |moment| matches!(moment, Moment::Entry { .. }))?;
    faults::point(10);
    match run_call(tracee, pid)? {
        0 => copy,
        error => Err(AttachError::Close { pid, source: io::Error::from_raw_os_error(-error as i32) }),
    }
}

/// Lets the call that the thread is entering run, and returns its result.
fn run_call(tracee: &Tracee, pid: i32) -> Result<i64, AttachError> {
    match run_to(tracee, pid, |moment| matches!(moment, Moment::Exit { .. }))? {
        Moment::Exit { result } => Ok(result),
        Moment::Entry { .. } => unreachable!("asked for an exit"),
    }
}

/// Lets the thread run to its next entry or exit of a system call. Neither call of ours can wait for anything, so
/// there is no time limit, and none could be kept: the thread can't be let go here.
fn run_to(tracee: &Tracee, pid: i32, wanted: fn(&Moment) -> bool) -> Result<Moment, AttachError> {
    let failed = |source| AttachError::Trace { pid, source };
    let mut signal = 0;
    loop {
        tracee.resume(signal).map_err(failed)?;
        signal = match tracee.wait().map_err(failed)? {
            Stop::Ended => return Err(AttachError::ended(pid)),
            Stop::Call => match tracee.moment().map_err(failed)? {
                moment if wanted(&moment) => return Ok(moment),
                _ => 0,
            },
            // It can't be blocked and has no handler: the whole process stops, and stays so when we let go.
            Stop::Signal(libc::SIGSTOP) => libc::SIGSTOP,
            // Every other signal is blocked, so the kernel raised it for what we did. It is not the thread's.
            Stop::Signal(_) | Stop::Other => 0,
        };
    }
}

fn refuse_traced(pid: i32) -> Result<(), AttachError> {
    match process::tracer(pid) {
        Ok(Some(tracer)) => Err(AttachError::Traced { pid, tracer, name: process::name(tracer) }),
        Ok(None) => Ok(()),
        Err(source) => Err(AttachError::Gone { pid, source }),
    }
}

/// Why the kernel refused to let us trace.
fn refusal(pid: i32, source: io::Error) -> AttachError {
    match source.raw_os_error() {
        Some(libc::ESRCH) => AttachError::Gone { pid, source },
        Some(libc::EPERM) => refuse_traced(pid).err().unwrap_or(AttachError::Forbidden { pid, source }),
        _ => AttachError::Trace { pid, source },
    }
}

/// Why no userfaultfd could be borrowed. The process is as it was, unless the message says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error("process {pid} has ended")]
    Gone { pid: i32, source: io::Error },
    #[error("process {pid} is traced by process {tracer} ({name}): only one can, end that first")]
    Traced { pid: i32, tracer: i32, name: String },
    #[error(
        "the kernel does not let us trace process {pid}: run as root or with CAP_SYS_PTRACE, and see          /proc/sys/kernel/yama/ptrace_scope (3 forbids it to everyone) and the LSM's log"
    )]
    Forbidden { pid: i32, source: io::Error },
    #[error(
        "no thread of process {pid} made a system call within {CALL_LIMIT:?} each: is it stuck or stopped?"
    )]
    NoCall { pid: i32 },
    #[error(
        "process {pid} makes system calls of architecture {arch:#x} by {found:02x?}; this whimbrel knows          {:#x} by {:02x?}",
        arch::AUDIT_ARCH,
        arch::CALL_INSTRUCTION
    )]
    Architecture { pid: i32, arch: u32, found: Vec<u8> },
    #[error(
        "process {pid} may not make a userfaultfd: its seccomp filter, its LSM policy or a kernel without          CONFIG_USERFAULTFD forbids it"
    )]
    Denied { pid: i32, source: io::Error },
    #[error(
        "the seccomp filter of process {pid} would punish system call {number}: start QEMU without -sandbox, or \
         with a sandbox that allows userfaultfd and close"
    )]
    Deadly { pid: i32, number: i32 },
    #[error(
        "process {pid} has a seccomp filter, and we may not read whether it allows a userfaultfd: run with \
         CAP_SYS_ADMIN and without a seccomp filter of our own"
    )]
    Filters { pid: i32, source: io::Error },
    #[error("a filter answered process {pid}'s userfaultfd call with {answer}, which is no userfaultfd")]
    Filtered { pid: i32, answer: i64 },
    #[error("cannot copy the userfaultfd out of process {pid}")]
    Copy { pid: i32, source: io::Error },
    #[error("process {pid} could not close its userfaultfd")]
    Close { pid: i32, source: io::Error },
    #[error("tracing process {pid} failed")]
    Trace { pid: i32, source: io::Error },
}

impl AttachError {
    fn ended(pid: i32) -> Self {
        Self::Gone { pid, source: io::Error::from_raw_os_error(libc::ESRCH) }
    }
}

/// Asynchronous write protection is no less with user mode only, and needs no privilege of QEMU.
const USERFAULTFD_FLAGS: u64 = libc::O_CLOEXEC as u64 | libc::O_NONBLOCK as u64 | UFFD_USER_MODE_ONLY;
const UFFD_USER_MODE_ONLY: u64 = 1;

/// QEMU's main loop makes thousands of system calls a second, but may wait for a processor on a crowded host.
const CALL_LIMIT: Duration = Duration::from_secs(1);

/// A process of which none of several threads makes a call is not one that can be moved.
const BORROW_LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
