//! What whimbrel asks of a running QEMU, by name: its identity, its run state, stop and go.

use crate::process::Process;
use crate::qmp::{LIMIT, Qmp, QmpError};
use serde_json::{Value, json};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A running QEMU and the connection to its monitor.
#[derive(Debug)]
pub struct Vm {
    qmp: Qmp,
    process: Process,
    version: Version,
}

/// A QEMU version; compares as people do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 10 in 10.0.2.
    pub major: u64,
    /// 0 in 10.0.2.
    pub minor: u64,
    /// 2 in 10.0.2.
    pub micro: u64,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// What must be the same at both ends for device state to fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The machine type with its version, for example `pc-q35-10.0`.
    pub name: String,
    /// log2 of the target page size where it belongs into the migration stream: on Arm, where it can vary.
    pub page_bits: Option<u32>,
    /// The vCPUs' type, for example `qemu64-x86_64-cpu`.
    pub cpu: String,
    /// How many vCPUs.
    pub cpu_count: usize,
}

/// QEMU's run state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunState {
    /// QEMU's word for it: `running`, `paused`, `inmigrate`, `io-error`, ...
    pub name: String,
    /// Whether the vCPUs run.
    pub running: bool,
}

/// What runs the vCPUs. It decides how dirty pages are best cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// KVM: the guest's second-level mappings follow the process's page tables.
    Kvm,
    /// QEMU's own translator, or anything else that uses the process's page tables directly.
    Tcg,
}

impl Vm {
    /// Connects to the monitor at `path` and learns whose it is.
    pub fn connect(path: &Path) -> Result<Self, VmError> {
        let qmp = Qmp::connect(path, LIMIT)?;
        let pid = qmp.peer_pid();
        let process =
            Process::open(pid).map_err(|source| VmError::Process { path: path.into(), pid, source })?;
        let version = version(qmp.greeting());
        Ok(Self { qmp, process, version })
    }

    /// The monitor, for what this type has no name for.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// The process that serves the monitor.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Whether QEMU's process has ended.
    pub fn has_ended(&self) -> bool {
        self.process.has_ended()
    }

    /// QEMU's version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Machine type and CPUs.
    pub fn machine(&mut self) -> Result<Machine, VmError> {
        let name = self.text("qom-get", json!({ "path": "/machine", "property": "type" }))?;
        let name = name.strip_suffix("-machine").unwrap_or(&name).to_owned();
        let arch =
            self.qmp.execute("query-target", json!({}))?["arch"].as_str().unwrap_or_default().to_owned();
        // QEMU sends it where its build can vary it and the machine asked for more than the least: `virt` has 12.
        let page_bits = (arch == "aarch64" || arch == "arm").then_some(12);
        let cpus = self.qmp.execute("query-cpus-fast", json!({}))?;
        let cpus = cpus.as_array().map(Vec::as_slice).unwrap_or_default();
        let first = cpus.first().and_then(|cpu| cpu["qom-path"].as_str()).ok_or(VmError::NoCpu)?;
        let cpu = self.text("qom-get", json!({ "path": first, "property": "type" }))?;
        Ok(Machine { name, page_bits, cpu, cpu_count: cpus.len() })
    }

    /// KVM or not.
    pub fn accelerator(&mut self) -> Result<Accelerator, VmError> {
        let kvm = self.qmp.execute("query-kvm", json!({}))?["enabled"] == json!(true);
        Ok(if kvm { Accelerator::Kvm } else { Accelerator::Tcg })
    }

    /// The run state at this moment.
    pub fn run_state(&mut self) -> Result<RunState, VmError> {
        let status = self.qmp.execute("query-status", json!({}))?;
        let name = status["status"].as_str().unwrap_or("unknown").to_owned();
        Ok(RunState { name, running: status["running"] == json!(true) })
    }

    /// Whether it was started with `-incoming defer` and nothing has come in yet.
    pub fn is_waiting(&mut self) -> Result<bool, VmError> {
        let migration = self.qmp.execute("query-migrate", json!({}))?;
        let untouched = matches!(migration["status"].as_str(), None | Some("none"));
        Ok(untouched && self.run_state()?.name == "inmigrate")
    }

    /// Stops the vCPUs, waits for all block I/O to end, and returns how long that took. A slow disk can take
    /// long; after `limit` the VM may still come to a stop, so `cont` must follow.
    pub fn stop(&mut self, limit: Duration) -> Result<Duration, VmError> {
        let start = Instant::now();
        self.qmp.execute_within("stop", json!({}), limit)?;
        let took = start.elapsed();
        let state = self.run_state()?;
        if state.running {
            return Err(VmError::StillRunning { state: state.name });
        }
        Ok(took)
    }

    /// Lets the vCPUs run; image locks are taken here. Fails if QEMU leaves the VM paused all the same.
    pub fn cont(&mut self) -> Result<(), VmError> {
        self.qmp.execute("cont", json!({}))?;
        let state = self.run_state()?;
        // A guest that at once shuts down or meets a full disk did run.
        match state.name.as_str() {
            "paused" | "prelaunch" | "inmigrate" | "postmigrate" | "finish-migrate" | "save-vm" => {
                Err(VmError::StillPaused { state: state.name })
            }
            _ => Ok(()),
        }
    }

    /// Ends QEMU.
    pub fn quit(&mut self) -> Result<(), VmError> {
        match self.qmp.execute("quit", json!({})) {
            Ok(_) | Err(QmpError::Closed { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// What lets a disk write guest RAM behind the page tables: the block nodes that bypass the page cache, and the
    /// SCSI devices that hand guest RAM to the host's disk as it is.
    pub fn direct_io_nodes(&mut self) -> Result<Vec<String>, VmError> {
        let nodes = self.qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
        let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
        let direct = nodes.iter().filter(|node| node["cache"]["direct"] == json!(true));
        let mut names: Vec<String> =
            direct.filter_map(|node| Some(node["node-name"].as_str()?.to_owned())).collect();
        for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let scsi = self.children(folder)?.into_iter().filter(|(_, kind)| kind == "scsi-block");
            names.extend(scsi.map(|(name, _)| name));
        }
        Ok(names)
    }

    /// The objects of a folder of QEMU's object tree, by name and type.
    pub(crate) fn children(&mut self, folder: &str) -> Result<Vec<(String, String)>, VmError> {
        let listed = self.qmp.execute("qom-list", json!({ "path": folder }))?;
        let child = |entry: &Value| {
            let kind = entry["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
            Some((entry["name"].as_str()?.to_owned(), kind.to_owned()))
        };
        Ok(listed.as_array().into_iter().flatten().filter_map(child).collect())
    }

    fn text(&mut self, command: &'static str, arguments: Value) -> Result<String, VmError> {
        match self.qmp.execute(command, arguments)? {
            Value::String(text) => Ok(text),
            other => Err(QmpError::Answer { command, text: other.to_string() }.into()),
        }
    }
}

fn version(greeting: &Value) -> Version {
    let part = |name: &str| greeting["version"]["qemu"][name].as_u64().unwrap_or_default();
    Version { major: part("major"), minor: part("minor"), micro: part("micro") }
}

/// Why a VM could not be asked or told.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum VmError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("cannot reach process {pid}, which listens on {path}: run where QEMU's process can be seen")]
    Process { path: PathBuf, pid: i32, source: io::Error },
    #[error("QEMU lists no vCPU")]
    NoCpu,
    #[error("QEMU answered stop, but the VM is {state}")]
    StillRunning { state: String },
    #[error("QEMU answered cont, but the VM is {state}")]
    StillPaused { state: String },
}
