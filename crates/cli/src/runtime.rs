//! What is kept in the runtime directory while whimbrel runs: a lock for each QEMU, a socket for each job, and the
//! record of each commit until both ends agree on it.

use crate::Stop;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use wire::{Session, TargetState};

/// `$WHIMBREL_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/whimbrel`, else `/run/whimbrel`; made if it is missing.
pub fn directory() -> Result<PathBuf, Stop> {
    let path = match (std::env::var_os("WHIMBREL_RUNTIME_DIR"), std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(path), _) => PathBuf::from(path),
        (None, Some(path)) => Path::new(&path).join("whimbrel"),
        (None, None) => "/run/whimbrel".into(),
    };
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
    made.map_err(|error| {
        Stop::failed(format!("cannot make the runtime directory {}: {error}", path.display()))
            .next("set WHIMBREL_RUNTIME_DIR to a directory that you may write to")
    })?;
    Ok(path)
}

/// Keeps every other whimbrel away from a QEMU.
pub struct Lock {
    _file: Flock<File>,
}

impl Lock {
    /// Locks the QEMU whose monitor is at `qmp`, or says who holds it. Before the monitor is spoken to: it serves one
    /// client at a time and would let the second one wait without a word.
    pub fn take(qmp: &Path) -> Result<Self, Stop> {
        let connected =
            UnixStream::connect(qmp).and_then(|stream| Ok(getsockopt(&stream, PeerCredentials)?.pid()));
        let qemu_pid = connected.map_err(|error| {
            Stop::failed(format!("cannot connect to the QMP socket {}: {error}", qmp.display()))
                .next(format!("start QEMU with -qmp unix:{},server=on,wait=off", qmp.display()))
        })?;
        let path = directory()?.join(format!("qemu-{qemu_pid}.lock"));
        let failed = |error| Stop::failed(format!("cannot lock {}: {error}", path.display()));
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let mut file = match Flock::lock(file.map_err(failed)?, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((mut file, nix::errno::Errno::EWOULDBLOCK)) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                let holder = holder.trim();
                return Err(Stop::failed(format!(
                    "QEMU {qemu_pid} is being migrated by another whimbrel (process {holder})"
                ))
                .next("whimbrel status"));
            }
            Err((_, error)) => return Err(failed(error.into())),
        };
        let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        written.map_err(failed)?;
        Ok(Self { _file: file })
    }
}

/// Which end kept a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// The source: *commit* is about to be written.
    Source,
    /// The target: *commit* has come.
    Target,
}

/// What an end knows of a migration from *commit* on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Record {
    /// The migration.
    pub session: Session,
    /// Who kept it.
    pub end: End,
    /// The process of this end's QEMU.
    pub qemu_pid: i32,
    /// Where the target listens, at the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Whether the guest ran before.
    pub running: bool,
    /// How far the target came.
    pub state: TargetState,
}

impl Record {
    /// Writes it to disk for good: when this returns, it outlives us.
    pub fn keep(&self) -> io::Result<()> {
        let path = self.path()?;
        let part = path.with_extension("part");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(&part, &path)?;
        File::open(path.parent().expect("a file in the runtime directory"))?.sync_all()
    }

    /// Both ends agree: it is of no more use.
    pub fn forget(&self) -> io::Result<()> {
        fs::remove_file(self.path()?)
    }

    /// The record of a migration at this end.
    pub fn of_session(session: Session, end: End) -> Option<Self> {
        Self::all().into_iter().find(|record| record.session == session && record.end == end)
    }

    /// The record that was kept about this QEMU.
    pub fn of_qemu(qemu_pid: i32) -> Option<Self> {
        Self::all().into_iter().find(|record| record.qemu_pid == qemu_pid)
    }

    fn all() -> Vec<Self> {
        let Ok(entries) =
            directory().and_then(|path| fs::read_dir(path).map_err(|e| Stop::failed(e.to_string())))
        else {
            return Vec::new();
        };
        let paths = entries.flatten().map(|entry| entry.path());
        let records = paths.filter(|path| path.extension().is_some_and(|end| end == "record"));
        records.filter_map(|path| serde_json::from_slice(&fs::read(path).ok()?).ok()).collect()
    }

    fn path(&self) -> io::Result<PathBuf> {
        let end = match self.end {
            End::Source => "source",
            End::Target => "target",
        };
        let directory = directory().map_err(|stop| io::Error::other(stop.text))?;
        Ok(directory.join(format!("{}-{end}.record", self.session)))
    }
}
