//! Preflight: what would keep a VM from being moved, or make it dear, found before anything is touched. Changes
//! nothing in QEMU.

mod devices;
mod disks;
mod host;
mod machine;
mod memory;

use crate::qmp::QmpError;
use crate::vm::{Vm, VmError};
use crate::{Error, with_cause};
use serde::Serialize;

/// What one test found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The test's name, a word or two. A test that finds several things has several findings.
    pub test: &'static str,
    /// Whether the VM can be moved as far as this goes.
    pub verdict: Verdict,
    /// What was found, in one line.
    pub text: String,
    /// What to do about it, where the text does not say it already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// The outcome of a test; the worst is the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Nothing in the way.
    Ok,
    /// It works, at a price that the text names.
    Warn,
    /// The VM can't be moved like this.
    Fail,
}

impl Finding {
    fn ok(test: &'static str, text: impl Into<String>) -> Self {
        Self { test, verdict: Verdict::Ok, text: text.into(), fix: None }
    }

    fn warn(test: &'static str, text: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { test, verdict: Verdict::Warn, text: text.into(), fix: Some(fix.into()) }
    }

    fn fail(test: &'static str, text: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { test, verdict: Verdict::Fail, text: text.into(), fix: Some(fix.into()) }
    }
}

/// A test: its name, and what looks.
type Test = (&'static str, fn(&'static str, &mut Vm) -> Result<Vec<Finding>, Error>);

/// Everything to know before this VM is moved away.
pub fn source(vm: &mut Vm) -> Vec<Finding> {
    run(
        vm,
        &[
            ("QEMU", machine::version),
            ("run state", machine::runs),
            ("kernel", host::kernel),
            ("tracing", host::tracing),
            ("seccomp", host::seccomp),
            ("RAM", memory::blocks),
            ("other writers", memory::other_writers),
            ("devices", devices::devices),
            ("network", devices::network),
            ("DMA", devices::dma),
            ("encryption", machine::encryption),
            ("device state", machine::device_state),
            ("migration", machine::migration),
            ("direct I/O", disks::direct_io),
            ("disks", disks::disks),
        ],
    )
}

/// Everything to know before a VM is moved into this QEMU.
pub fn target(vm: &mut Vm) -> Vec<Finding> {
    run(
        vm,
        &[
            ("QEMU", machine::version),
            ("run state", machine::waits),
            ("tracing", host::tracing),
            ("RAM", memory::blocks),
            ("locked RAM", memory::locked),
            ("other writers", memory::other_writers),
            ("capabilities", machine::capabilities),
        ],
    )
}

fn run(vm: &mut Vm, tests: &[Test]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, test) in tests {
        match test(name, vm) {
            Ok(found) => findings.extend(found),
            Err(error) => {
                let ended = is_end(&error);
                let text = with_cause(&error);
                findings.push(Finding { test: name, verdict: Verdict::Fail, text, fix: None });
                if ended {
                    break;
                }
            }
        }
    }
    findings
}

/// Whether there is nobody left to ask.
fn is_end(error: &Error) -> bool {
    matches!(error, Error::Qmp(QmpError::Closed { .. }) | Error::Vm(VmError::Qmp(QmpError::Closed { .. })))
}
