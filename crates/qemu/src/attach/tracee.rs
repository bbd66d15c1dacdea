//! A thread that we trace: the few ptrace requests that are needed, with their types. Decides nothing.

#![expect(unsafe_code, reason = "ptrace takes addresses whose meaning depends on the request")]

use super::seccomp::Instruction;
use std::io;
use std::ptr;
use std::time::{Duration, Instant};

/// A traced thread. The kernel lets it go when the thread that traces it ends.
#[derive(Debug)]
pub(super) struct Tracee {
    thread: i32,
}

/// Why a traced thread stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// It enters or leaves a system call.
    Call,
    /// It is about to receive this signal.
    Signal(i32),
    /// It was interrupted by us, or is part of a group stop.
    Other,
    /// It ended.
    Ended,
}

/// Where in a system call a thread is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    /// About to be run.
    Entry {
        /// The calling convention, as `AUDIT_ARCH_*`.
        arch: u32,
    },
    /// Just run.
    Exit {
        /// What it returns; negative is an error number.
        result: i64,
    },
}

impl Tracee {
    /// Starts tracing without stopping the thread.
    pub fn seize(thread: i32) -> io::Result<Self> {
        let tracee = Self { thread };
        tracee.request(PTRACE_SEIZE, 0, libc::PTRACE_O_TRACESYSGOOD as usize)?;
        Ok(tracee)
    }

    /// Its number.
    pub fn thread(&self) -> i32 {
        self.thread
    }

    /// Asks it to stop; a system call that it sleeps in is interrupted.
    pub fn interrupt(&self) -> io::Result<()> {
        self.request(PTRACE_INTERRUPT, 0, 0).map(drop)
    }

    /// Sends it on, with a signal if not 0, to its next entry or exit of a system call.
    pub fn resume(&self, signal: i32) -> io::Result<()> {
        self.request(PTRACE_SYSCALL, 0, signal as usize).map(drop)
    }

    /// Runs it, and us, before everything else on this host, so that a busy host does not keep it standing. Returns
    /// what [`Tracee::calm`] is to set again; none if we have no right to this, or it is hurried already.
    pub fn hurry(&self) -> Option<i32> {
        schedule(0, libc::SCHED_FIFO, 1);
        // SAFETY: takes and returns a number: the policy with the flag that children do not inherit it.
        let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, self.thread) } as i32;
        let usual = matches!(policy & !libc::SCHED_RESET_ON_FORK, libc::SCHED_OTHER | libc::SCHED_BATCH);
        (usual && schedule(self.thread, libc::SCHED_FIFO, 1)).then_some(policy)
    }

    /// Sets its scheduling policy again. The kernel has kept its nice value. To step down takes no right.
    pub fn calm(&self, policy: i32) {
        schedule(self.thread, policy, 0);
    }

    /// Lets it go. A group stop that it was held out of takes it now.
    pub fn detach(self) -> io::Result<()> {
        self.request(PTRACE_DETACH, 0, 0).map(drop)
    }

    /// Waits for it to stop; none if it has not by `deadline`.
    pub fn wait_until(&self, deadline: Instant) -> io::Result<Option<Stop>> {
        loop {
            let stop = self.look(libc::WNOHANG)?;
            if stop.is_some() || Instant::now() >= deadline {
                return Ok(stop);
            }
            std::thread::sleep(LOOK_PAUSE);
        }
    }

    /// Waits for it to stop, which must be sure to happen. Leaves the processor to it.
    pub fn wait(&self) -> io::Result<Stop> {
        Ok(self.look(0)?.expect("a wait without WNOHANG ends with a stop"))
    }

    fn look(&self, flags: i32) -> io::Result<Option<Stop>> {
        loop {
            let mut status = 0;
            // SAFETY: `status` is a place for one int.
            match unsafe { libc::waitpid(self.thread, &mut status, libc::__WALL | flags) } {
                0 => return Ok(None),
                -1 => match io::Error::last_os_error() {
                    error if error.raw_os_error() == Some(libc::EINTR) => {}
                    error => return Err(error),
                },
                _ => return Ok(Some(stop(status))),
            }
        }
    }

    /// Where in a system call it is stopped.
    pub fn moment(&self) -> io::Result<Moment> {
        // struct ptrace_syscall_info: u8 op, 3 unused bytes, u32 arch, u64 pc, u64 sp, then by op: at an entry
        // u64 number and 6 arguments, at an exit i64 result and u8 is_error.
        let mut info = [0u64; 11];
        let address = ptr::from_mut(&mut info) as usize;
        self.request(PTRACE_GET_SYSCALL_INFO, size_of_val(&info), address)?;
        let [op, _, _, _, a0, a1, a2, a3] = info[0].to_ne_bytes();
        match op {
            1 => Ok(Moment::Entry { arch: u32::from_ne_bytes([a0, a1, a2, a3]) }),
            2 => Ok(Moment::Exit { result: info[3] as i64 }),
            other => Err(io::Error::other(format!("stopped at neither entry nor exit of a call ({other})"))),
        }
    }

    /// The signals it blocks, one bit each. If it waits with another mask, the one that it goes back to.
    pub fn signal_mask(&self) -> io::Result<u64> {
        let mut mask = 0u64;
        let address = ptr::from_mut(&mut mask) as usize;
        self.request(PTRACE_GETSIGMASK, size_of_val(&mask), address)?;
        Ok(mask)
    }

    /// Sets the signals it blocks. SIGKILL and SIGSTOP can't be.
    pub fn set_signal_mask(&self, mask: u64) -> io::Result<()> {
        let address = ptr::from_ref(&mask) as usize;
        self.request(PTRACE_SETSIGMASK, size_of_val(&mask), address).map(drop)
    }

    /// Reads a register set of exactly the type's size.
    pub fn register_set<T: Copy>(&self, which: i32, mut into: T) -> io::Result<T> {
        let mut place = libc::iovec { iov_base: ptr::from_mut(&mut into).cast(), iov_len: size_of::<T>() };
        self.request(PTRACE_GETREGSET, which as usize, ptr::from_mut(&mut place) as usize)?;
        if place.iov_len != size_of::<T>() {
            return Err(io::Error::other(format!(
                "a register set of {} bytes: not a 64-bit thread",
                place.iov_len
            )));
        }
        Ok(into)
    }

    /// Writes a register set.
    pub fn set_register_set<T: Copy>(&self, which: i32, from: &T) -> io::Result<()> {
        let mut place =
            libc::iovec { iov_base: ptr::from_ref(from).cast_mut().cast(), iov_len: size_of::<T>() };
        self.request(PTRACE_SETREGSET, which as usize, ptr::from_mut(&mut place) as usize).map(drop)
    }

    /// Seccomp filter number `index`, the latest being 0; none if there are no more. It needs CAP_SYS_ADMIN.
    pub fn filter(&self, index: usize) -> io::Result<Option<Vec<Instruction>>> {
        let count = match self.request(PTRACE_SECCOMP_GET_FILTER, index, 0) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            count => count?,
        };
        let mut program = vec![Instruction::default(); count as usize];
        self.request(PTRACE_SECCOMP_GET_FILTER, index, program.as_mut_ptr() as usize)?;
        Ok(Some(program))
    }

    fn request(&self, request: u32, address: usize, data: usize) -> io::Result<libc::c_long> {
        // SAFETY: `address` and `data` are what `request` takes: numbers, or the address of a local of the caller
        // that has the size the request is told.
        let result = unsafe { libc::syscall(libc::SYS_ptrace, request, self.thread, address, data) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }
}

/// Sets a thread's scheduling policy, 0 being our own. The system call itself: not every libc passes it on.
fn schedule(thread: i32, policy: i32, priority: i32) -> bool {
    // SAFETY: takes numbers and reads `priority`, which is all there is to a `struct sched_param`.
    unsafe { libc::syscall(libc::SYS_sched_setscheduler, thread, policy, &priority) == 0 }
}

fn stop(status: i32) -> Stop {
    if !libc::WIFSTOPPED(status) {
        return Stop::Ended;
    }
    let event = status >> 16;
    match libc::WSTOPSIG(status) {
        signal if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        _ if event != 0 => Stop::Other,
        signal => Stop::Signal(signal),
    }
}

// linux/ptrace.h; libcs give these different types, and some leave some out.
const PTRACE_DETACH: u32 = 17;
const PTRACE_SYSCALL: u32 = 24;
const PTRACE_GETREGSET: u32 = 0x4204;
const PTRACE_SETREGSET: u32 = 0x4205;
const PTRACE_SEIZE: u32 = 0x4206;
const PTRACE_INTERRUPT: u32 = 0x4207;
const PTRACE_GETSIGMASK: u32 = 0x420a;
const PTRACE_SETSIGMASK: u32 = 0x420b;
const PTRACE_SECCOMP_GET_FILTER: u32 = 0x420c;
const PTRACE_GET_SYSCALL_INFO: u32 = 0x420e;

/// A thread that has stopped stands still until we look; one that has not wants the processor that looking takes.
const LOOK_PAUSE: Duration = Duration::from_micros(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_are_told_apart() {
        assert_eq!(stop(0x857f), Stop::Call);
        assert_eq!(stop(0x137f), Stop::Signal(libc::SIGSTOP));
        assert_eq!(stop(libc::PTRACE_EVENT_STOP << 16 | 0x057f), Stop::Other);
        assert_eq!(stop(libc::PTRACE_EVENT_STOP << 16 | 0x137f), Stop::Other);
        assert_eq!(stop(0x0100), Stop::Ended);
        assert_eq!(stop(libc::SIGKILL), Stop::Ended);
    }
}
