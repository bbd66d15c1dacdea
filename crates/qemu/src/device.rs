//! The state of all devices without RAM: saved by a stopped QEMU into memory of ours, loaded by one that waits.
//! Knows the commands, not what is in the state.

use crate::qmp::{Qmp, QmpError};
use crate::vm::{Vm, VmError};
use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::Mode;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

pub use crate::stream::{StreamError, compose};

/// Saves the state of all devices. The VM must be stopped; QEMU lets go of its image locks with this, and takes
/// them again with `cont`. Guest RAM may be written once more while this runs.
pub fn save(vm: &mut Vm) -> Result<Vec<u8>, DeviceError> {
    let state = vm.run_state()?;
    if state.running {
        return Err(DeviceError::Running);
    }
    let memory = memfd_create("whimbrel-device-state", MFdFlags::MFD_CLOEXEC).map_err(DeviceError::memory)?;
    let mut memory = File::from(memory);
    let set = lend(vm.qmp(), &memory)?;
    let arguments = json!({ "filename": format!("/dev/fdset/{set}") });
    let saved = vm.qmp().execute_within("xen-save-devices-state", arguments, SAVE_LIMIT);
    let returned = vm.qmp().execute("remove-fd", json!({ "fdset-id": set }));
    saved?;
    returned?;
    read_back(&mut memory)
}

/// Gives QEMU a descriptor to write into `memory`, and returns the number of the set that it is in.
fn lend(qmp: &mut Qmp, memory: &File) -> Result<u64, DeviceError> {
    // QEMU looks for a descriptor with exactly the flags that it would open a file with: write-only.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    let write_only = open(path.as_str(), flags, Mode::empty()).map_err(DeviceError::memory)?;
    let command = "add-fd";
    let added = qmp.execute_with_fd(command, json!({ "opaque": FDSET_MARK }), write_only.as_fd())?;
    let set = added["fdset-id"].as_u64();
    Ok(set.ok_or_else(|| QmpError::Answer { command, text: added.to_string() })?)
}

fn read_back(memory: &mut File) -> Result<Vec<u8>, DeviceError> {
    let bytes = memory.metadata()?.len();
    if bytes > STATE_BYTES_MAX {
        return Err(DeviceError::TooLarge { bytes });
    }
    let mut state = Vec::with_capacity(bytes as usize);
    memory.rewind()?;
    memory.read_to_end(&mut state)?;
    Ok(state)
}

/// Takes descriptors back that an earlier whimbrel lent and could not take back.
pub(crate) fn forget_lent(qmp: &mut Qmp) -> Result<(), QmpError> {
    let sets = qmp.execute("query-fdsets", json!({}))?;
    let ours = |set: &&Value| {
        set["fds"].as_array().is_some_and(|fds| fds.iter().any(|fd| fd["opaque"] == FDSET_MARK))
    };
    for set in sets.as_array().into_iter().flatten().filter(ours) {
        qmp.execute("remove-fd", json!({ "fdset-id": set["fdset-id"] }))?;
    }
    Ok(())
}

/// Loads a composed stream into a QEMU that waits with `-incoming defer`. All RAM must be in place before, since
/// device loaders read it. Afterwards the VM is paused. A QEMU older than 9.1 ends if it can't load the stream.
pub fn load(vm: &mut Vm, stream: &[u8]) -> Result<(), DeviceError> {
    if !vm.is_waiting()? {
        return Err(DeviceError::NotWaiting { state: vm.run_state()?.name });
    }
    let deadline = Instant::now() + LOAD_LIMIT;
    let (ours, theirs) = UnixStream::pair()?;
    vm.qmp().execute_with_fd("getfd", json!({ "fdname": FD_NAME }), OwnedFd::from(theirs).as_fd())?;
    listen(vm.qmp())?;
    let written = write(ours, stream, deadline);
    let outcome = outcome(vm, deadline);
    // If QEMU gave up reading, its own reason says more than ours.
    outcome?;
    written?;
    let state = vm.run_state()?;
    if state.running || state.name != "paused" {
        return Err(DeviceError::NotPaused { state: state.name });
    }
    Ok(())
}

fn listen(qmp: &mut Qmp) -> Result<(), DeviceError> {
    let uri = format!("fd:{FD_NAME}");
    // Since 9.1 a QEMU can survive a stream that it can't load, and tell why.
    match qmp.execute("migrate-incoming", json!({ "uri": uri, "exit-on-error": false })) {
        Err(error) if error.is_unknown() => qmp.execute("migrate-incoming", json!({ "uri": uri }))?,
        other => other?,
    };
    Ok(())
}

fn write(mut socket: UnixStream, mut stream: &[u8], deadline: Instant) -> Result<(), DeviceError> {
    socket.set_nonblocking(true)?;
    while !stream.is_empty() {
        match socket.write(stream) {
            Ok(count) => stream = &stream[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(DeviceError::LoadLate { limit: LOAD_LIMIT });
                }
                let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
                let _ = poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)], timeout);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn outcome(vm: &mut Vm, deadline: Instant) -> Result<(), DeviceError> {
    loop {
        let migration = match vm.qmp().execute("query-migrate", json!({})) {
            Err(QmpError::Closed { .. }) => return Err(DeviceError::Ended),
            other => other?,
        };
        match migration["status"].as_str() {
            Some("completed") => return Ok(()),
            Some("failed") => {
                let reason = migration["error-desc"].as_str().unwrap_or("no reason given");
                return Err(DeviceError::Load { reason: reason.to_owned() });
            }
            _ if Instant::now() >= deadline => return Err(DeviceError::LoadLate { limit: LOAD_LIMIT }),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Why device state could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DeviceError {
    #[error(transparent)]
    Vm(#[from] VmError),
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error("device state can only be saved while the VM is stopped")]
    Running,
    #[error("no memory for the device state")]
    Memory { source: io::Error },
    #[error("the device state has {bytes} bytes; at most {STATE_BYTES_MAX} are taken")]
    TooLarge { bytes: u64 },
    #[error("the target QEMU is {state}, it does not wait for a VM: start it with -incoming defer")]
    NotWaiting { state: String },
    #[error("the target QEMU could not load the device state: {reason}; its own log says more")]
    Load { reason: String },
    #[error("the target QEMU ended while it loaded the device state; its own log says why")]
    Ended,
    #[error("the target QEMU did not load the device state in {limit:?}")]
    LoadLate { limit: Duration },
    #[error("the target QEMU loaded the device state and is {state} instead of paused")]
    NotPaused { state: String },
    #[error("device state could not be moved")]
    Io(#[from] io::Error),
}

impl DeviceError {
    fn memory(errno: nix::errno::Errno) -> Self {
        Self::Memory { source: errno.into() }
    }
}

/// A q35 has 170 to 224 KB. Video cards with their own 3D state and large PCI trees stay far below this.
const STATE_BYTES_MAX: u64 = 64 << 20;

/// Saving takes 2.5 ms; it also inactivates the disks, which may have to write back their metadata.
const SAVE_LIMIT: Duration = Duration::from_secs(30);

/// Loading takes about 10 ms.
const LOAD_LIMIT: Duration = Duration::from_secs(30);

/// How the guard knows a descriptor of ours in QEMU.
const FDSET_MARK: &str = "whimbrel";

/// What QEMU is to call the stream's descriptor.
const FD_NAME: &str = "whimbrel-incoming";
