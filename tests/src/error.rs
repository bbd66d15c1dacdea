//! Why a VM did not start: the machine lacks something, or something is broken. A lack skips a test, loudly.

use std::io::{self, Write};
use std::path::PathBuf;

/// Why a VM could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// This machine can't run the test; another may.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// QEMU ended, or did not answer, before its monitor was there.
    #[error("QEMU did not start: {stderr}\ncommand: {command}")]
    Boot {
        /// The command line.
        command: String,
        /// All that QEMU printed.
        stderr: String,
    },
    /// A guest could not be built.
    #[error("{script} failed: {output}")]
    Build {
        /// The build script.
        script: PathBuf,
        /// All that it printed.
        output: String,
    },
    /// The harness could not do its own work.
    #[error("{what}: {source}")]
    Io {
        /// What was attempted.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What this machine lacks, and how to get it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Missing(pub String);

impl Error {
    pub(crate) fn missing(what: impl Into<String>) -> Self {
        Error::Missing(Missing(what.into()))
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Error::Io { what: what.into(), source }
    }
}

/// Gives the value, or ends the test: as skipped if the machine lacks something, else as failed.
#[macro_export]
macro_rules! or_skip {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err($crate::Error::Missing(missing)) => return $crate::skip(&missing.to_string()),
            Err(error) => panic!("{error}"),
        }
    };
}

/// Says on the real standard error (the test runner does not hold it back) that this test was skipped, and
/// adds the line to the file that `WHIMBREL_SKIPPED` names, so that a summary can list them.
pub fn skip(reason: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let line = format!("SKIPPED: {test}: {reason}\n");
    // Nobody is left to tell when standard error is gone.
    let _ = io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("WHIMBREL_SKIPPED") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        file.and_then(|mut file| file.write_all(line.as_bytes()))
            .unwrap_or_else(|error| panic!("can't note a skipped test in {}: {error}", path.display()));
    }
}
