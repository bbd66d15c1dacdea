//! A process that the demo started: it ends with the demo, however that ends.

#![expect(unsafe_code, reason = "asks the kernel, in the child, to end it with its parent")]

use crate::Stop;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitStatus, Stdio};

/// A running process. It is killed when dropped, and by the kernel when the demo is killed.
pub struct Child {
    process: process::Child,
    directory: PathBuf,
    name: String,
}

impl Child {
    /// Starts it with its output in files of `directory`. Ctrl-C doesn't reach it: the demo decides what ends when.
    pub fn start(name: &str, command: &mut Command, directory: &Path) -> Result<Self, Stop> {
        Self::start_loud(name, command.stderr(create(directory, name, "stderr")?), directory)
    }

    /// As `start`, but for standard error, which stays where `command` has it.
    pub fn start_loud(name: &str, command: &mut Command, directory: &Path) -> Result<Self, Stop> {
        command.stdin(Stdio::null()).stdout(create(directory, name, "stdout")?).process_group(0);
        // SAFETY: between fork and exec only a system call is made, which takes no memory and no lock.
        unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGKILL)?)) };
        let process = command.spawn().map_err(|error| {
            Stop::failed(format!("cannot start {}: {error}", command.get_program().display()))
        })?;
        Ok(Self { process, directory: directory.into(), name: name.into() })
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().expect("a child of ours")
    }

    /// Asks it to end, as Ctrl-C does.
    pub fn interrupt(&self) {
        // One that has ended needs no asking; until it is waited for, nobody else has its pid.
        let _ = kill(Pid::from_raw(self.process.id() as i32), Signal::SIGINT);
    }

    pub fn stdout(&self) -> String {
        self.read("stdout")
    }

    pub fn stderr(&self) -> String {
        self.read("stderr")
    }

    fn read(&self, what: &str) -> String {
        let path = self.directory.join(format!("{}.{what}", self.name));
        String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn create(directory: &Path, name: &str, what: &str) -> Result<File, Stop> {
    let path = directory.join(format!("{name}.{what}"));
    File::create(&path).map_err(|error| Stop::failed(format!("cannot write {}: {error}", path.display())))
}
