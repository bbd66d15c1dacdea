//! The `whimbrel` program: what people type, and what they are told. Decides nothing about a migration.

mod args;
mod check;
mod demo;
mod faults;
mod job;
mod progress;
mod quantity;
mod receive;
mod report;
mod resolve;
mod runtime;
mod send;
mod signals;
mod source_vm;
mod target_vm;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some(qemu::guard::ARGUMENT) {
        return qemu::guard::main();
    }
    let done = match Cli::parse().command {
        Command::Check(args) => check::run(&args),
        Command::Receive(args) => receive::run(args),
        Command::Migrate(args) => send::run(args),
        Command::Status(args) => job::show(&args),
        Command::Cancel(args) => job::cancel(&args),
        Command::Resolve(args) => resolve::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "whimbrel", &mut std::io::stdout());
            Ok(Exit::Done)
        }
        Command::Man { directory } => write_man_pages(&directory),
    };
    match done {
        Ok(exit) => exit.into(),
        Err(failure) => {
            eprintln!("whimbrel: {}", failure.text);
            if let Some(next) = failure.next {
                eprintln!("    next: {next}");
            }
            failure.exit.into()
        }
    }
}

fn write_man_pages(directory: &Path) -> Result<Exit, Stop> {
    let failed = |error| Stop::usage(format!("cannot write man pages to {}: {error}", directory.display()));
    clap_mangen::generate_to(Cli::command(), directory).map_err(failed)?;
    Ok(Exit::Done)
}

/// How the program ends. The numbers are promised in the README.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// What was asked for is done.
    Done = 0,
    /// It failed; the VM runs where it ran.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The VM can't be moved as it is.
    Refused = 3,
    /// The operator ended it; the VM runs where it ran.
    Cancelled = 4,
    /// It did not converge in time; the VM runs where it ran.
    NotConverging = 5,
    /// The other end, or the way to it; the VM runs where it ran.
    Peer = 6,
    /// Who owns the VM is in doubt, or it stands still: a person must look.
    Person = 7,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// Why a command ends without having begun, and what to type next.
#[derive(Debug)]
pub struct Stop {
    /// The exit code.
    pub exit: Exit,
    /// What failed, and who owns the VM.
    pub text: String,
    /// The next command to type.
    pub next: Option<String>,
}

impl Stop {
    /// The command line is wrong.
    pub fn usage(text: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, text: text.into(), next: None }
    }

    /// It can't be done; nothing was touched.
    pub fn failed(text: impl Into<String>) -> Self {
        Self { exit: Exit::Failed, text: text.into(), next: None }
    }

    /// With the next command to type.
    pub fn next(self, next: impl Into<String>) -> Self {
        Self { next: Some(next.into()), ..self }
    }

    /// An error of QEMU's, before anything was touched.
    pub fn qemu(error: impl std::error::Error + 'static) -> Self {
        Self::failed(migrate::told(&error))
    }
}
