//! Injections into processes that notice everything: wrong registers, a lost signal, an interrupted call, a timeout
//! that starts anew. The children are forks that touch nothing but system calls and a shared page.

#![expect(unsafe_code, reason = "forked children, signal handlers and registers")]

use super::*;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::time::Duration;

/// What a child and its test share.
struct Shared {
    /// Counts what the child did.
    count: AtomicI64,
    /// 0, or what went wrong.
    wrong: AtomicI64,
    /// Handled signals.
    signals: AtomicI64,
}

/// A forked child, killed at the end.
struct Child {
    pid: i32,
    shared: &'static Shared,
}

impl Child {
    /// Forks a child that runs `life`, which must not allocate, lock or return before it is done.
    fn fork(life: fn(&'static Shared)) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, of zeros, which is a valid `Shared`, and is never unmapped.
        let shared: &'static Shared = unsafe {
            let page = libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0);
            assert_ne!(page, libc::MAP_FAILED);
            &*page.cast()
        };
        // SAFETY: the child makes system calls only, as `life` promises.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            // What other tests have borrowed is not the child's.
            // SAFETY: nothing in the child owns a descriptor.
            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
            schedule_unusually();
            life(shared);
            // SAFETY: ends the child without running anything of the test's.
            unsafe { libc::_exit(0) };
        }
        let child = Self { pid, shared };
        child.wait_for("the child to begin", || child.count() > 0);
        child
    }

    fn count(&self) -> i64 {
        self.shared.count.load(SeqCst)
    }

    fn wait_for(&self, what: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < deadline, "waited in vain for {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The child goes on, noticed nothing, has no descriptor of ours and is not traced.
    fn check_unharmed(&self) {
        let before = self.count();
        self.wait_for("the child to go on", || self.count() > before);
        assert_eq!(self.shared.wrong.load(SeqCst), 0);
        self.check_untouched();
    }

    fn check_untouched(&self) {
        self.wait_for("the tracer to leave", || process::tracer(self.pid).unwrap().is_none());
        // SAFETY: takes and returns numbers.
        let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, self.pid) };
        assert_eq!(policy, i64::from(libc::SCHED_BATCH | libc::SCHED_RESET_ON_FORK));
        let entries = std::fs::read_dir(format!("/proc/{}/fd", self.pid)).unwrap();
        for entry in entries.flatten() {
            let link = std::fs::read_link(entry.path()).unwrap_or_default();
            assert_ne!(link.as_os_str(), "anon_inode:[userfaultfd]");
        }
    }

    fn state(&self) -> String {
        process::status_field(self.pid, "State").unwrap()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of ours. Tracing it may have been what took note of its end.
        unsafe { libc::kill(self.pid, signal) };
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        // SAFETY: our own child.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}

/// In a child: a policy that is not what a careless hand would set.
fn schedule_unusually() {
    let policy = libc::SCHED_BATCH | libc::SCHED_RESET_ON_FORK;
    // SAFETY: takes numbers and reads a `struct sched_param`, which is one number.
    unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &0) };
}

/// A handler finds the shared page here.
static HANDLED: std::sync::atomic::AtomicPtr<Shared> =
    std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());

extern "C" fn handle(_signal: i32) {
    // SAFETY: set before the first signal, to a page that stays.
    unsafe { (*HANDLED.load(SeqCst)).signals.fetch_add(1, SeqCst) };
}

/// In a child: counts this signal.
fn on_signal(shared: &'static Shared, signal: i32) {
    HANDLED.store(std::ptr::from_ref(shared).cast_mut(), SeqCst);
    // SAFETY: a plain structure of numbers, a handler that only adds.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
}

/// In a child: SIGALRM every `micros`, counted.
fn storm(shared: &'static Shared, micros: i64) {
    on_signal(shared, libc::SIGALRM);
    // SAFETY: plain structures of numbers.
    unsafe {
        let every = libc::timeval { tv_sec: 0, tv_usec: micros };
        let timer = libc::itimerval { it_interval: every, it_value: every };
        libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut());
    }
}

/// In a child: one call of getppid with a pattern in every register that it leaves alone. False if one changed.
#[cfg(target_arch = "x86_64")]
fn call_keeps_registers(parent: i32, seed: u64) -> bool {
    let pattern = |number: u64| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number;
    let mut r = [0u64; 10];
    let result: u64;
    // SAFETY: a system call without effect; what it changes is named.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_getppid as u64 => result,
            lateout("rcx") _, lateout("r11") _,
            inlateout("rdi") pattern(0) => r[0], inlateout("rsi") pattern(1) => r[1],
            inlateout("rdx") pattern(2) => r[2], inlateout("r8") pattern(3) => r[3],
            inlateout("r9") pattern(4) => r[4], inlateout("r10") pattern(5) => r[5],
            inlateout("r12") pattern(6) => r[6], inlateout("r13") pattern(7) => r[7],
            inlateout("r14") pattern(8) => r[8], inlateout("r15") pattern(9) => r[9],
        );
    }
    result == parent as u64 && (0..10).all(|at| r[at as usize] == pattern(at))
}

/// In a child: one call of getppid with a pattern in every register that it leaves alone. False if one changed.
#[cfg(target_arch = "aarch64")]
fn call_keeps_registers(parent: i32, seed: u64) -> bool {
    let pattern = |number: u64| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number;
    let mut r = [0u64; 12];
    let (result, number): (u64, u64);
    // SAFETY: a system call without effect; what it changes is named.
    unsafe {
        std::arch::asm!(
            "svc #0",
            inlateout("x8") libc::SYS_getppid as u64 => number, inlateout("x0") pattern(99) => result,
            inlateout("x1") pattern(0) => r[0], inlateout("x2") pattern(1) => r[1],
            inlateout("x3") pattern(2) => r[2], inlateout("x4") pattern(3) => r[3],
            inlateout("x5") pattern(4) => r[4], inlateout("x6") pattern(5) => r[5],
            inlateout("x7") pattern(6) => r[6], inlateout("x9") pattern(7) => r[7],
            inlateout("x15") pattern(8) => r[8], inlateout("x16") pattern(9) => r[9],
            inlateout("x20") pattern(10) => r[10], inlateout("x28") pattern(11) => r[11],
        );
    }
    let kept = (0..12).all(|at| r[at as usize] == pattern(at));
    result == parent as u64 && number == libc::SYS_getppid as u64 && kept
}

/// In a child: calls and checks for ever.
fn call_for_ever(shared: &'static Shared) {
    let parent = unsafe_getppid();
    for seed in 1.. {
        if !call_keeps_registers(parent, seed) {
            shared.wrong.store(1, SeqCst);
        }
        shared.count.fetch_add(1, SeqCst);
    }
}

fn unsafe_getppid() -> i32 {
    // SAFETY: returns a number.
    unsafe { libc::getppid() }
}

#[test]
fn no_register_changes_under_a_storm_of_signals_and_none_of_them_is_lost() {
    let child = Child::fork(|shared| {
        on_signal(shared, libc::SIGRTMIN());
        call_for_ever(shared);
    });
    let mut sent = 0;
    std::thread::scope(|scope| {
        let injections = scope.spawn(|| {
            for _ in 0..300 {
                borrow_userfaultfd(child.pid).unwrap();
            }
        });
        // Each of these is queued and handled on its own.
        while !injections.is_finished() {
            child.signal(libc::SIGRTMIN());
            sent += 1;
            std::thread::sleep(Duration::from_micros(20));
        }
    });
    child.wait_for("every signal", || child.shared.signals.load(SeqCst) >= sent);
    child.check_unharmed();
    assert_eq!(child.shared.signals.load(SeqCst), sent);
}

#[test]
fn what_is_borrowed_is_a_userfaultfd_of_that_process() {
    let child = Child::fork(call_for_ever);
    let borrowed = borrow_userfaultfd(child.pid).unwrap();
    // struct uffdio_api: the version, the features asked for, the ioctls found.
    let mut api = [0xaa_u64, 0, 0];
    const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
    // SAFETY: the structure has the size that the request's number says.
    let done = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&borrowed.fd), UFFDIO_API, &mut api) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
    // struct uffdio_register: a range of the child, the mode, the ioctls found. The shared page is in both of us.
    let mut register = [std::ptr::from_ref(child.shared) as u64, 4096, 2, 0];
    const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
    // SAFETY: as above.
    let done =
        unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&borrowed.fd), UFFDIO_REGISTER, &mut register) };
    let error = io::Error::last_os_error();
    let watched = |pid: i32| {
        let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        smaps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" uw"))
    };
    assert!(done == 0 && watched(child.pid) && !watched(std::process::id() as i32), "{done} {error}");
    drop(borrowed);
    assert!(!watched(child.pid), "the last descriptor takes the watch with it");
    child.check_unharmed();
}

#[test]
fn a_sleep_lasts_as_long_as_it_was_to() {
    const SLEEP: Duration = Duration::from_millis(600);
    let child = Child::fork(|shared| {
        shared.count.store(1, SeqCst);
        let start = Instant::now();
        let time = libc::timespec { tv_sec: 0, tv_nsec: SLEEP.as_nanos() as i64 };
        // SAFETY: reads `time`.
        let slept =
            unsafe { libc::syscall(libc::SYS_nanosleep, &time, std::ptr::null_mut::<libc::timespec>()) };
        shared.wrong.store(slept, SeqCst);
        shared.count.store(start.elapsed().as_millis() as i64, SeqCst);
        loop {
            std::hint::spin_loop();
        }
    });
    let start = Instant::now();
    while start.elapsed() < SLEEP / 2 {
        borrow_userfaultfd(child.pid).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_for("the child to wake up", || child.count() > 1);
    let slept = child.count() as u128;
    assert_eq!(child.shared.wrong.load(SeqCst), 0, "the sleep was cut short with an error");
    assert!((SLEEP.as_millis()..SLEEP.as_millis() * 7 / 5).contains(&slept), "slept for {slept} ms");
    child.check_untouched();
}

#[test]
fn a_wait_for_signals_misses_none_and_sees_no_interruption_of_ours() {
    let child = Child::fork(|shared| {
        // SAFETY: plain structures of numbers.
        unsafe {
            let (mut none, mut alarm): (libc::sigset_t, libc::sigset_t) =
                (std::mem::zeroed(), std::mem::zeroed());
            libc::sigaddset(&mut alarm, libc::SIGALRM);
            libc::sigprocmask(libc::SIG_BLOCK, &alarm, std::ptr::null_mut());
            libc::sigemptyset(&mut none);
            storm(shared, 500);
            loop {
                let before = shared.signals.load(SeqCst);
                let result = libc::ppoll(std::ptr::null_mut(), 0, std::ptr::null(), &none);
                let error = io::Error::last_os_error().raw_os_error();
                // Each return is one signal handled inside, and the mask outside is what it was.
                if result != -1 || error != Some(libc::EINTR) || shared.signals.load(SeqCst) != before + 1 {
                    shared.wrong.store(1, SeqCst);
                }
                let mut now: libc::sigset_t = std::mem::zeroed();
                libc::sigprocmask(libc::SIG_BLOCK, std::ptr::null(), &mut now);
                if libc::sigismember(&now, libc::SIGALRM) != 1 || libc::sigismember(&now, libc::SIGUSR1) != 0
                {
                    shared.wrong.store(2, SeqCst);
                }
                shared.count.fetch_add(1, SeqCst);
            }
        }
    });
    for _ in 0..200 {
        borrow_userfaultfd(child.pid).unwrap();
    }
    child.check_unharmed();
}

#[test]
fn a_thread_that_makes_no_call_is_passed_over_for_one_that_does() {
    let child = Child::fork(|shared| {
        let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
        // SAFETY: the thread takes nothing and is never joined.
        unsafe {
            libc::pthread_create(thread.as_mut_ptr(), std::ptr::null(), sleep_for_ever, std::ptr::null_mut())
        };
        loop {
            shared.count.fetch_add(1, SeqCst);
        }
    });
    let borrowed = borrow_userfaultfd(child.pid).unwrap();
    assert!(borrowed.stood_still < CALL_LIMIT, "{:?}", borrowed.stood_still);
    child.check_unharmed();
}

extern "C" fn sleep_for_ever(_nothing: *mut libc::c_void) -> *mut libc::c_void {
    loop {
        // SAFETY: a signal's arrival is all that ends it.
        unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 8) };
    }
}

#[test]
fn a_process_that_makes_no_call_at_all_runs_on_untouched() {
    let child = Child::fork(|shared| {
        loop {
            shared.count.fetch_add(1, SeqCst);
        }
    });
    let error = borrow_userfaultfd(child.pid).unwrap_err();
    assert!(matches!(error, AttachError::NoCall { .. }), "{error}");
    child.check_unharmed();
}

#[test]
fn a_stopped_process_stays_stopped_and_goes_on_when_told() {
    let child = Child::fork(call_for_ever);
    child.signal(libc::SIGSTOP);
    child.wait_for("the child to stop", || child.state().starts_with('T'));
    borrow_userfaultfd(child.pid).unwrap();
    child.wait_for("the child to stop again", || child.state() == "T (stopped)");
    child.check_untouched();
    let stopped_at = child.count();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(child.count(), stopped_at);
    child.signal(libc::SIGCONT);
    child.check_unharmed();
}

#[test]
fn stops_and_continues_in_the_middle_of_it_change_nothing() {
    let child = Child::fork(call_for_ever);
    std::thread::scope(|scope| {
        let signals = scope.spawn(|| {
            for turn in 0..400 {
                child.signal(if turn % 2 == 0 { libc::SIGSTOP } else { libc::SIGCONT });
                std::thread::sleep(Duration::from_micros(150));
            }
        });
        while !signals.is_finished() {
            borrow_userfaultfd(child.pid).unwrap();
        }
    });
    child.signal(libc::SIGCONT);
    child.check_unharmed();
}

#[test]
fn a_process_that_is_killed_in_the_middle_is_an_error_not_a_hang() {
    let mut gone = 0;
    for turn in 0..60 {
        let child = Child::fork(call_for_ever);
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(turn * 5));
                child.signal(libc::SIGKILL);
            });
            borrow_userfaultfd(child.pid)
        });
        gone += usize::from(outcome.is_err());
    }
    assert!(gone > 0, "no kill came in time to be in the middle");
}

#[test]
fn the_one_who_traces_already_is_named() {
    let child = Child::fork(call_for_ever);
    let held = Tracee::seize(child.pid).unwrap();
    let error = borrow_userfaultfd(child.pid).unwrap_err();
    // SAFETY: returns a number.
    let own = unsafe { libc::gettid() };
    assert!(matches!(error, AttachError::Traced { tracer, .. } if tracer == own), "{error}");
    held.interrupt().unwrap();
    held.wait().unwrap();
    held.detach().unwrap();
    child.check_unharmed();
}

/// In a child: a filter that answers userfaultfd with this.
fn filter(answer: u32) {
    let step = |code: u16, jt: u8, jf: u8, k: u32| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        step(0x20, 0, 0, 0),
        step(0x15, 0, 1, libc::SYS_userfaultfd as u32),
        step(0x06, 0, 0, answer),
        step(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: program.as_mut_ptr() };
    // SAFETY: the program is read before the call returns.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program);
    }
}

#[test]
fn a_filter_that_allows_it_is_no_hindrance_and_one_that_fails_it_is_an_error() {
    let allowed = Child::fork(|shared| {
        filter(libc::SECCOMP_RET_ALLOW);
        call_for_ever(shared);
    });
    borrow_userfaultfd(allowed.pid).unwrap();
    allowed.check_unharmed();

    let denied = Child::fork(|shared| {
        filter(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
        call_for_ever(shared);
    });
    let error = borrow_userfaultfd(denied.pid).unwrap_err();
    assert!(matches!(error, AttachError::Denied { .. }), "{error}");
    denied.check_unharmed();
}

#[test]
fn a_filter_that_would_kill_is_not_put_to_the_test() {
    for life in [
        |shared| {
            filter(libc::SECCOMP_RET_KILL_PROCESS);
            call_for_ever(shared);
        },
        |shared| {
            filter(libc::SECCOMP_RET_TRAP);
            call_for_ever(shared);
        },
    ] {
        let child = Child::fork(life);
        let error = borrow_userfaultfd(child.pid).unwrap_err();
        assert!(matches!(error, AttachError::Deadly { .. }), "{error}");
        child.check_unharmed();
    }
}

#[test]
fn a_process_that_is_gone_is_named() {
    let error = borrow_userfaultfd(i32::MAX).unwrap_err();
    assert!(matches!(error, AttachError::Gone { pid: i32::MAX, .. }), "{error}");
}
