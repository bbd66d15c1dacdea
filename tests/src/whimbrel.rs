//! The `whimbrel` program as a user starts it. Knows how to find it, follow it, and end it at a bad moment.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::wait_until;

/// A `whimbrel` that runs. Killed when dropped, and with the thread that started it.
pub struct Whimbrel {
    arguments: Vec<String>,
    child: Child,
    directory: TempDir,
    started: Instant,
}

/// A `whimbrel` that has ended.
#[derive(Debug, Clone)]
pub struct Finished {
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Its exit code; none if a signal ended it.
    pub code: Option<i32>,
    /// All of its standard output.
    pub stdout: String,
    /// All of its standard error.
    pub stderr: String,
    /// From start to end.
    pub took: Duration,
}

impl Whimbrel {
    /// Starts it with these arguments.
    #[track_caller]
    pub fn start<S: AsRef<str>>(arguments: &[S]) -> Self {
        Self::start_without("", arguments)
    }

    /// Starts it with a rule switched off, as `WHIMBREL_FAULT` names it: the test that guards the rule must fail.
    #[track_caller]
    pub fn start_without<S: AsRef<str>>(rule: &str, arguments: &[S]) -> Self {
        let arguments: Vec<String> = arguments.iter().map(|word| word.as_ref().to_owned()).collect();
        let directory = tempfile::Builder::new().prefix("whimbrel-run-").tempdir().expect("/tmp is writable");
        let file =
            |name: &str| File::create(directory.path().join(name)).expect("a directory of ours is writable");
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program())
            .args(&arguments)
            .env("WHIMBREL_FAULT", rule)
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn()
            .expect("setpriv (of util-linux) starts");
        Whimbrel { arguments, child, directory, started: Instant::now() }
    }

    /// Starts it and waits for its end.
    #[track_caller]
    pub fn run<S: AsRef<str>>(arguments: &[S], deadline: Duration) -> Finished {
        Self::start(arguments).wait(deadline)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, such as SIGINT or SIGSTOP.
    pub fn signal(&self, signal: Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid() as i32), signal)
            .expect("whimbrel is a child of ours and was not waited for");
    }

    /// Ends it with SIGKILL.
    pub fn kill(mut self) -> Finished {
        self.child.kill().expect("a child may always be killed");
        self.wait(Duration::from_secs(10))
    }

    /// Standard error so far.
    pub fn stderr(&self) -> String {
        self.text("stderr")
    }

    /// Standard output so far.
    pub fn stdout(&self) -> String {
        self.text("stdout")
    }

    /// Waits for a line with this text, on standard error or standard output.
    #[track_caller]
    pub fn wait_line(&mut self, text: &str, deadline: Duration) -> String {
        let found = wait_until(deadline, || {
            let ended = self.child.try_wait().expect("whimbrel is a child of ours").is_some();
            let said = self.stderr() + &self.stdout();
            let line = said.split_inclusive('\n').find(|line| line.ends_with('\n') && line.contains(text));
            line.map(|line| Ok(line.trim_end().to_owned())).or(ended.then_some(Err(())))
        });
        match found {
            Some(Ok(line)) => line,
            Some(Err(())) => panic!("{self:?} ended without saying {text:?}"),
            None => panic!("{self:?} did not say {text:?} within {deadline:?}"),
        }
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(mut self, deadline: Duration) -> Finished {
        let status = wait_until(deadline, || self.child.try_wait().expect("whimbrel is a child of ours"));
        let Some(status) = status else { panic!("{self:?} has not ended within {deadline:?}") };
        Finished {
            arguments: self.arguments.clone(),
            code: status.code(),
            stdout: self.stdout(),
            stderr: self.stderr(),
            took: self.started.elapsed(),
        }
    }

    fn text(&self, name: &str) -> String {
        let bytes = fs::read(self.directory.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl std::fmt::Debug for Whimbrel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (stdout, stderr) = (self.stdout(), self.stderr());
        write!(
            f,
            "`whimbrel {}`\n--- stdout:\n{stdout}\n--- stderr:\n{stderr}\n---\n",
            self.arguments.join(" ")
        )
    }
}

impl Drop for Whimbrel {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Finished {
    /// The JSON object on the last line of standard output.
    #[track_caller]
    pub fn json(&self) -> Value {
        let line = self.stdout.lines().last().unwrap_or_default();
        serde_json::from_str(line)
            .unwrap_or_else(|error| panic!("no JSON in the last line: {error}\n{self:#?}"))
    }

    /// Asserts the exit code.
    #[track_caller]
    pub fn expect_code(&self, code: i32) -> &Self {
        assert_eq!(
            self.code,
            Some(code),
            "whimbrel {}\n{}\n{}",
            self.arguments.join(" "),
            self.stdout,
            self.stderr
        );
        self
    }
}

/// `WHIMBREL_BIN`, else the program that was built beside this test.
fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("WHIMBREL_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().expect("a test knows its path");
    let profile = test.ancestors().nth(2).unwrap_or(Path::new("."));
    let program = profile.join("whimbrel");
    assert!(
        program.exists(),
        "{} is not there: run `cargo build` first, or set WHIMBREL_BIN",
        program.display()
    );
    program
}
