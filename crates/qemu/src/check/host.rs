//! Does this host let us do what we must?

use super::Finding;
use crate::Error;
use crate::process;
use crate::vm::Vm;
use nix::sys::utsname::uname;
use std::fs;

type Found = Result<Vec<Finding>, Error>;

/// Write tracking is tried on memory of our own; version numbers tell little.
pub(super) fn kernel(test: &'static str, _vm: &mut Vm) -> Found {
    let release = uname().map_or("?".into(), |name| name.release().to_string_lossy().into_owned());
    Ok(vec![match dirty::Probes::run() {
        Ok(probes) if probes.needs_hole_scan() => Finding::ok(
            test,
            format!("Linux {release} tells which pages were written; discards by a second scan"),
        ),
        Ok(_) => Finding::ok(test, format!("Linux {release} tells which pages were written")),
        Err(error) => Finding::fail(
            test,
            format!("Linux {release} does not tell which pages were written: {error}"),
            "boot Linux 6.7 or newer (arm64: 6.10) with userfaultfd and PAGEMAP_SCAN",
        ),
    }])
}

/// Opening its memory asks for the same rights as tracing it, of the same places: capabilities, Yama, LSMs.
pub(super) fn tracing(test: &'static str, vm: &mut Vm) -> Found {
    let pid = vm.pid();
    if let Ok(Some(tracer)) = process::tracer(pid) {
        let text = format!("process {pid} is traced by process {tracer} ({})", process::name(tracer));
        return Ok(vec![Finding::fail(test, text, format!("end process {tracer}"))]);
    }
    let opened = fs::File::open(format!("/proc/{pid}/mem"));
    Ok(vec![match opened {
        Ok(_) => Finding::ok(test, format!("process {pid} can be traced")),
        Err(error) => {
            let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
            let fix = missing_right(scope.trim(), capability(CAP_SYS_PTRACE));
            Finding::fail(test, format!("process {pid} may not be traced: {error}"), fix)
        }
    }])
}

/// The one thing that is missing.
fn missing_right(scope: &str, can_trace: bool) -> &'static str {
    match (scope, can_trace) {
        ("3", _) => "reboot without kernel.yama.ptrace_scope=3, which forbids tracing to everyone until then",
        (_, true) => "an LSM (SELinux, AppArmor) forbids it; its log names the rule",
        ("1" | "2", false) => "run as root or with CAP_SYS_PTRACE; kernel.yama.ptrace_scope asks for it",
        (_, false) => "run as root or with CAP_SYS_PTRACE",
    }
}

/// A filter's answer to our system call is read before the call, and to read it takes a right of its own.
pub(super) fn seccomp(test: &'static str, vm: &mut Vm) -> Found {
    let mode = |pid: i32| process::status_field(pid, "Seccomp").unwrap_or_else(|_| "0".into());
    let own = mode(std::process::id() as i32);
    Ok(vec![match (mode(vm.pid()).as_str(), own.as_str()) {
        ("0", _) => Finding::ok(test, "QEMU has no system call filter"),
        (_, "0") if capability(CAP_SYS_ADMIN) => {
            Finding::ok(test, "QEMU has a system call filter, which is asked before the attach")
        }
        (_, "0") => Finding::fail(
            test,
            "QEMU has a system call filter, and we may not read it",
            "run as root or with CAP_SYS_ADMIN, or start QEMU without -sandbox",
        ),
        _ => Finding::fail(
            test,
            "QEMU has a system call filter, and we may not read it because we have one too",
            "run whimbrel without a filter (docker: --security-opt seccomp=unconfined)",
        ),
    }])
}

/// Whether we have a capability now.
fn capability(number: u32) -> bool {
    let own = process::status_field(std::process::id() as i32, "CapEff").unwrap_or_default();
    u64::from_str_radix(&own, 16).is_ok_and(|effective| effective & (1 << number) != 0)
}

/// linux/capability.h
const CAP_SYS_PTRACE: u32 = 19;
/// linux/capability.h
const CAP_SYS_ADMIN: u32 = 21;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_right_is_named_and_no_other() {
        assert!(missing_right("3", true).contains("ptrace_scope=3"));
        assert!(missing_right("0", false).ends_with("CAP_SYS_PTRACE"));
        assert!(missing_right("1", false).contains("ptrace_scope"));
        assert!(missing_right("", true).contains("LSM"));
    }
}
