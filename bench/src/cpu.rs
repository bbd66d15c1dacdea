//! CPU time, to the nanosecond where the kernel has it, of processes that run and of children that have ended.

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;
use std::fs;
use std::time::Duration;

/// CPU time of all threads of a process so far, also of those that have ended.
pub fn of_process(pid: u32) -> Duration {
    let clock = clock_getcpuclockid(Pid::from_raw(pid as i32)).expect("a process of ours has a clock");
    clock.now().expect("its clock can be read").into()
}

/// CPU time of one thread so far.
pub fn of_thread(pid: u32, thread: u64) -> Duration {
    let path = format!("/proc/{pid}/task/{thread}/schedstat");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let nanoseconds = text.split(' ').next().and_then(|word| word.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or_else(|| panic!("{path} says {text:?}")))
}

/// CPU time of all children that were waited for, and of theirs.
pub fn of_ended_children() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).expect("a call with fixed arguments");
    let microseconds = (usage.user_time() + usage.system_time()).num_microseconds();
    Duration::from_micros(microseconds as u64)
}
