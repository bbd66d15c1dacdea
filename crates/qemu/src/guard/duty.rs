//! What the guard's own process does: waits for requests, and when whimbrel is gone runs the VM on if it must.

#![expect(unsafe_code, reason = "ignoring signals and closing what was inherited have no safe wrapper")]

use super::link::{Link, Reply, Request};
use crate::attach;
use crate::device;
use crate::process::Process;
use crate::qmp::{Qmp, QmpError};
use crate::with_cause;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigHandler, Signal, signal};
use serde_json::json;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Runs a guard: to be called by a program whose first argument is [`super::ARGUMENT`]. Its link is its standard
/// input. Returns when whimbrel has ended and there is nothing left to do.
pub fn main() -> ExitCode {
    let link = match detach_from_parent() {
        Ok(link) => link,
        Err(error) => {
            eprintln!("whimbrel-guard: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut guard = Duty { armed: None };
    // An error on the link means the same as its end: whimbrel is gone.
    if link.send(&Reply::Done, None).is_ok() {
        while let Ok(Some((request, fd))) = link.receive(None) {
            let (reply, fd) = guard.serve(request, fd);
            if link.send(&reply, fd.as_ref().map(AsFd::as_fd)).is_err() {
                break;
            }
        }
    }
    match guard.armed {
        Some(watched) => watched.run_on(),
        None => ExitCode::SUCCESS,
    }
}

/// Leaves whimbrel's session, and what it may have inherited, behind.
fn detach_from_parent() -> std::io::Result<Link> {
    nix::unistd::setsid()?;
    // SAFETY: the name is a C string. Else `ps` would show the name of the link that we were started by, `exe`.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"whimbrel-guard".as_ptr()) };
    for ignored in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGPIPE] {
        // SAFETY: ignoring a signal runs no handler.
        unsafe { signal(ignored, SigHandler::SigIgn)? };
    }
    // SAFETY: this process has opened nothing yet, so nothing above the standard three is owned by anyone here.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    Ok(Link::from(std::io::stdin().as_fd().try_clone_to_owned()?))
}

struct Duty {
    armed: Option<Watched>,
}

impl Duty {
    fn serve(&mut self, request: Request, fd: Option<OwnedFd>) -> (Reply, Option<OwnedFd>) {
        match request {
            Request::Borrow { pid } => return borrow(pid),
            Request::Arm { qmp, pid } => match Process::open(pid) {
                Ok(process) => self.armed = Some(Watched { qmp, process }),
                Err(error) => return failed(format!("QEMU's process {pid}: {error}")),
            },
            Request::Disarm => self.armed = None,
            Request::Commit { message } => match fd {
                Some(socket) => return (self.commit(&socket, &message), None),
                None => return failed("no socket came with the commit".into()),
            },
        }
        (Reply::Done, None)
    }

    fn commit(&mut self, socket: &OwnedFd, message: &[u8]) -> Reply {
        let armed = self.armed.take();
        match write_all(socket, message) {
            Ok(()) => Reply::Done,
            Err((0, error)) => {
                self.armed = armed;
                Reply::Unsent { text: error.to_string() }
            }
            Err((count, error)) => {
                let text =
                    format!("only {count} of {} bytes of the commit were sent: {error}", message.len());
                Reply::Failed { text }
            }
        }
    }
}

fn failed(text: String) -> (Reply, Option<OwnedFd>) {
    (Reply::Failed { text }, None)
}

fn borrow(pid: i32) -> (Reply, Option<OwnedFd>) {
    match attach::borrow_userfaultfd(pid) {
        Ok(borrowed) => {
            let stood_still_ns = borrowed.stood_still.as_nanos() as u64;
            (Reply::Borrowed { stood_still_ns }, Some(borrowed.fd))
        }
        Err(error) => failed(with_cause(&error)),
    }
}

/// Writes all of `bytes`, or says how many went out before the error. Gives up on a peer that takes nothing.
fn write_all(socket: &OwnedFd, bytes: &[u8]) -> Result<(), (usize, Errno)> {
    let deadline = Instant::now() + COMMIT_LIMIT;
    let mut count = 0;
    while count < bytes.len() {
        match nix::unistd::write(socket, &bytes[count..]) {
            Ok(more) => count += more,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) if Instant::now() < deadline => {
                let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
                let _ = poll(&mut fds, PollTimeout::from(10u8));
            }
            Err(error) => return Err((count, error)),
        }
    }
    Ok(())
}

/// A QEMU that must not stay stopped.
struct Watched {
    qmp: PathBuf,
    process: Process,
}

impl Watched {
    /// Whimbrel is gone: runs the VM on if it is stopped, and takes back what whimbrel had lent QEMU.
    fn run_on(&self) -> ExitCode {
        let start = Instant::now();
        loop {
            match run_on(&self.qmp) {
                Ok(was_stopped) => {
                    if was_stopped {
                        let took = start.elapsed();
                        eprintln!(
                            "whimbrel-guard: whimbrel ended with the VM stopped; it runs again, after {took:?}"
                        );
                    }
                    return ExitCode::SUCCESS;
                }
                Err(_) if self.process.has_ended() => {
                    eprintln!("whimbrel-guard: whimbrel ended with the VM stopped, and so did QEMU");
                    return ExitCode::FAILURE;
                }
                Err(error) if start.elapsed() >= RUN_ON_LIMIT => {
                    let (error, qmp) = (with_cause(&error), self.qmp.display());
                    eprintln!(
                        "whimbrel-guard: the VM is stopped and can't be run on: {error}. Send `cont` to {qmp}"
                    );
                    return ExitCode::FAILURE;
                }
                // The monitor still has whimbrel's connection to end, or somebody else was quicker.
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }
}

/// Runs the VM on if it is stopped, and says whether it was.
fn run_on(path: &Path) -> Result<bool, QmpError> {
    let mut qmp = Qmp::connect(path, CONNECT_LIMIT)?;
    let status = qmp.execute("query-status", json!({}))?;
    // Only what whimbrel's own `stop` leads to: a VM that stopped itself has its own reason.
    let stopped = matches!(status["status"].as_str(), Some("paused" | "save-vm" | "finish-migrate"));
    if stopped {
        qmp.execute("cont", json!({}))?;
    }
    device::forget_lent(&mut qmp)?;
    Ok(stopped)
}

/// A commit goes into an empty socket buffer, so it is written at once or the connection is dead.
const COMMIT_LIMIT: Duration = Duration::from_secs(2);

/// How long to wait for a greeting. It comes when QEMU has seen whimbrel's connection end, or another client's; to
/// give up sooner would only put a dead connection before the next one.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// Often enough that the VM runs on within 1 s.
const RETRY: Duration = Duration::from_millis(10);

/// A VM that stays stopped is the worst outcome, so there is little reason to give up.
const RUN_ON_LIMIT: Duration = Duration::from_secs(120);
