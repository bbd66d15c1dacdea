//! A small process of our own beside whimbrel, which a SIGKILL of whimbrel does not touch. It does what must be
//! finished once begun: the injection, and running the VM on if whimbrel dies with the VM stopped.

mod duty;
mod link;

use crate::vm::Vm;
use link::{Link, Reply, Request};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

pub use duty::main;

/// The program's first argument that makes it a guard: it must then call [`main`] and nothing else.
pub const ARGUMENT: &str = "--whimbrel-guard";

/// Our end of a guard. Dropping it while armed is like dying: the guard runs the VM on.
#[derive(Debug)]
pub struct Guard {
    // Taken in `drop`, which is what ends the guard.
    link: Option<Link>,
    child: Child,
    qmp: PathBuf,
    pid: i32,
    armed: bool,
}

impl Guard {
    /// Starts a guard for this VM, by running this program again with [`ARGUMENT`].
    pub fn start(vm: &mut Vm) -> Result<Self, GuardError> {
        let started = |source| GuardError::Start { source };
        let (ours, theirs) = Link::pair().map_err(started)?;
        let qmp = std::path::absolute(vm.qmp().path()).map_err(started)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("whimbrel-guard").arg(ARGUMENT).stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        let child = command.spawn().map_err(started)?;
        // The command holds the guard's end. With that gone, a guard that fails to start is an end of file here.
        drop(command);
        let mut guard = Self { link: Some(ours), child, qmp, pid: vm.pid(), armed: false };
        guard.reply("start", LIMIT)?;
        Ok(guard)
    }

    /// Borrows a userfaultfd of QEMU: the guard stops one of its threads for a moment. Returns it, the only copy
    /// there is, and how long the thread stood still.
    pub fn borrow_userfaultfd(&mut self) -> Result<(OwnedFd, Duration), GuardError> {
        match self.ask(&Request::Borrow { pid: self.pid }, None)? {
            (Reply::Borrowed { stood_still_ns }, Some(fd)) => Ok((fd, Duration::from_nanos(stood_still_ns))),
            (reply, _) => Err(GuardError::Reply { reply: format!("{reply:?}") }),
        }
    }

    /// From now on the guard runs the VM on if we end. Only for a VM that runs: one that its owner has paused must
    /// stay so.
    pub fn arm(&mut self) -> Result<(), GuardError> {
        self.ask(&Request::Arm { qmp: self.qmp.clone(), pid: self.pid }, None)?;
        self.armed = true;
        Ok(())
    }

    /// From now on the guard does nothing if we end. When this returns, it knows.
    pub fn disarm(&mut self) -> Result<(), GuardError> {
        self.ask(&Request::Disarm, None)?;
        self.armed = false;
        Ok(())
    }

    /// Disarms the guard and has it write `message` to `socket`, in one step that our own death can't split: either
    /// the VM runs on at the source, or the message is on its way. On [`GuardError::Unsent`] the guard is armed as
    /// before; on any other error nobody knows whether the message went out, and the VM is not run on by itself.
    pub fn commit(&mut self, socket: BorrowedFd<'_>, message: &[u8]) -> Result<(), GuardError> {
        assert!(message.len() <= COMMIT_BYTES_MAX, "a commit of {} bytes", message.len());
        let armed = std::mem::replace(&mut self.armed, false);
        match self.ask(&Request::Commit { message: message.to_vec() }, Some(socket)) {
            Ok(_) => Ok(()),
            Err(error) => {
                self.armed = armed && matches!(error, GuardError::Unsent { .. });
                Err(error)
            }
        }
    }

    fn ask(
        &mut self,
        request: &Request,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(Reply, Option<OwnedFd>), GuardError> {
        let duty = request.duty();
        let sent = self.link().send(request, fd);
        sent.map_err(|source| GuardError::Lost { duty, source })?;
        self.reply(duty, LIMIT)
    }

    fn reply(&mut self, duty: &'static str, limit: Duration) -> Result<(Reply, Option<OwnedFd>), GuardError> {
        let received = self.link().receive(Some(limit));
        match received.map_err(|source| GuardError::Lost { duty, source })? {
            Some((Reply::Failed { text }, _)) => Err(GuardError::Failed { text }),
            Some((Reply::Unsent { text }, _)) => Err(GuardError::Unsent { text }),
            Some(reply) => Ok(reply),
            None => Err(GuardError::Lost { duty, source: io::ErrorKind::UnexpectedEof.into() }),
        }
    }

    fn link(&self) -> &Link {
        self.link.as_ref().expect("the link is there until drop")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.link.take());
        // A guard that has nothing to do ends at once. One that runs a VM on may take long and needs no witness.
        if !self.armed {
            let _ = self.child.wait();
        }
    }
}

/// Why the guard did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum GuardError {
    #[error("cannot start the guard process")]
    Start { source: io::Error },
    #[error("the guard process was lost at {duty}: something killed it")]
    Lost { duty: &'static str, source: io::Error },
    #[error("{text}")]
    Failed { text: String },
    #[error("the commit was not sent: {text}")]
    Unsent { text: String },
    #[error("the guard process answered {reply}, which was not expected")]
    Reply { reply: String },
}

/// All that a guard does is done in milliseconds; finding a thread to inject into may take a second.
const LIMIT: Duration = Duration::from_secs(10);

/// A commit is a few words; it must fit a message to the guard.
const COMMIT_BYTES_MAX: usize = 8 << 10;
