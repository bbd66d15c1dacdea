//! Is this a QEMU, in a state, that can be moved?

use super::Finding;
use crate::Error;
use crate::vm::{Version, Vm};
use serde_json::{Value, json};

type Found = Result<Vec<Finding>, Error>;

/// QEMU shows where its RAM is since 8.0.
pub(super) fn version(test: &'static str, vm: &mut Vm) -> Found {
    const OLDEST: Version = Version { major: 8, minor: 0, micro: 0 };
    let version = vm.version();
    let text = format!("QEMU {version}, process {}", vm.pid());
    Ok(vec![match version >= OLDEST {
        true => Finding::ok(test, text),
        false => {
            Finding::fail(test, format!("{text}, does not show where its RAM is"), "use QEMU 8.0 or newer")
        }
    }])
}

/// At the source.
pub(super) fn runs(test: &'static str, vm: &mut Vm) -> Found {
    let state = vm.run_state()?.name;
    Ok(vec![match state.as_str() {
        "running" | "paused" => Finding::ok(test, format!("the VM is {state}")),
        "inmigrate" => Finding::fail(test, "this QEMU waits for a VM", "give the source's QMP socket"),
        _ => Finding::fail(
            test,
            format!("the VM is {state}, which the target would not know"),
            "see why, then let it run or pause it",
        ),
    }])
}

/// At the target.
pub(super) fn waits(test: &'static str, vm: &mut Vm) -> Found {
    let fix = "start it with the same options as the source, and -incoming defer";
    Ok(vec![match vm.is_waiting()? {
        true => Finding::ok(test, "waits for a VM"),
        false => {
            let state = vm.run_state()?.name;
            Finding::fail(test, format!("the VM is {state}, it does not wait with -incoming defer"), fix)
        }
    }])
}

/// RAM that only the guest can read can't be copied.
pub(super) fn encryption(test: &'static str, vm: &mut Vm) -> Found {
    let fix = "such a guest can't be moved from outside";
    let property = json!({ "path": "/machine", "property": "confidential-guest-support" });
    if let Some(object) = ask(vm, "qom-get", property)?.as_str().filter(|object| !object.is_empty()) {
        return Ok(vec![Finding::fail(test, format!("the guest's RAM is encrypted by {object}"), fix)]);
    }
    if ask(vm, "query-sev", json!({}))?["enabled"] == json!(true) {
        return Ok(vec![Finding::fail(test, "the guest's RAM is encrypted by SEV", fix)]);
    }
    Ok(vec![Finding::ok(test, "RAM is not encrypted")])
}

/// The command that saves device state must be there, and all devices must support to be saved.
pub(super) fn device_state(test: &'static str, vm: &mut Vm) -> Found {
    let commands = vm.qmp().execute("query-commands", json!({}))?;
    let known =
        commands.as_array().into_iter().flatten().any(|command| command["name"] == "xen-save-devices-state");
    if !known {
        let text = "this build of QEMU has no command to save device state";
        return Ok(vec![Finding::fail(
            test,
            text,
            "use a build that has xen-save-devices-state, as Debian's",
        )]);
    }
    let blocked = vm.qmp().execute("query-migrate", json!({}))?;
    let reasons = blocked["blocked-reasons"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let found: Vec<Finding> = reasons
        .map(|reason| {
            Finding::fail(test, format!("QEMU can't save it all: {reason}"), "unplug it (device_del)")
        })
        .collect();
    Ok(if found.is_empty() { vec![Finding::ok(test, "every device can be saved")] } else { found })
}

/// QEMU's own migration must not be at work.
pub(super) fn migration(test: &'static str, vm: &mut Vm) -> Found {
    let migration = vm.qmp().execute("query-migrate", json!({}))?;
    Ok(vec![match migration["status"].as_str() {
        None | Some("none" | "completed" | "failed" | "cancelled") => {
            Finding::ok(test, "QEMU's own migration is not at work")
        }
        Some(status) => {
            let text = format!("QEMU's own migration is {status}");
            Finding::fail(test, text, "let it end, or end it with migrate_cancel")
        }
    }])
}

/// Capabilities change what a target expects to come in.
pub(super) fn capabilities(test: &'static str, vm: &mut Vm) -> Found {
    let capabilities = vm.qmp().execute("query-migrate-capabilities", json!({}))?;
    let on =
        capabilities.as_array().into_iter().flatten().filter(|capability| capability["state"] == json!(true));
    let found: Vec<Finding> = on
        .filter_map(|capability| capability["capability"].as_str())
        .filter(|name| CHANGES_STREAM.contains(name))
        .map(|name| {
            let text = format!("migration capability {name} is on, so it expects another stream");
            Finding::fail(test, text, format!("turn it off: migrate_set_capability {name} off"))
        })
        .collect();
    Ok(if found.is_empty() { vec![Finding::ok(test, "expects a plain stream")] } else { found })
}

/// Asks what not every version or architecture knows; null then.
fn ask(vm: &mut Vm, command: &'static str, arguments: Value) -> Result<Value, Error> {
    match vm.qmp().execute(command, arguments) {
        Err(crate::qmp::QmpError::Refused { .. }) => Ok(Value::Null),
        other => Ok(other?),
    }
}

/// With each of these QEMU waits for something that a stream of device state does not have.
const CHANGES_STREAM: &[&str] = &[
    "background-snapshot",
    "mapped-ram",
    "multifd",
    "postcopy-preempt",
    "postcopy-ram",
    "rdma-pin-all",
    "return-path",
    "validate-uuid",
    "x-colo",
    "x-ignore-shared",
];
