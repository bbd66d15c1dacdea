//! A limit on what one process may read from the disk below a file, by the kernel's cgroups (version 1 or 2).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::Error;

/// A cgroup with a read limit. Removed when dropped; its process must have ended by then.
pub(crate) struct ReadLimit {
    group: PathBuf,
}

impl ReadLimit {
    /// Puts the process into a cgroup of its own that reads the disk below `file` at no more than this rate.
    /// Fails with [`Error::Missing`] where that needs more rights or another kernel.
    pub fn put(pid: u32, file: &Path, bytes_per_second: u64) -> Result<Self, Error> {
        Self::try_put(pid, file, bytes_per_second)
            .map_err(|error| Error::missing(format!("can't slow the disk below {}: {error}", file.display())))
    }

    fn try_put(pid: u32, file: &Path, bytes_per_second: u64) -> Result<Self, String> {
        let device = disk_below(file)?;
        let (root, knob, line) = if Path::new(VERSION_1).is_dir() {
            (VERSION_1, "blkio.throttle.read_bps_device", format!("{device} {bytes_per_second}"))
        } else {
            write(&Path::new(VERSION_2).join("cgroup.subtree_control"), "+io")?;
            (VERSION_2, "io.max", format!("{device} rbps={bytes_per_second}"))
        };
        let limit = ReadLimit { group: Path::new(root).join(format!("whimbrel-{pid}")) };
        fs::create_dir(&limit.group).map_err(|error| format!("{}: {error}", limit.group.display()))?;
        write(&limit.group.join(knob), &line)?;
        write(&limit.group.join("cgroup.procs"), &pid.to_string())?;
        Ok(limit)
    }
}

const VERSION_1: &str = "/sys/fs/cgroup/blkio";
const VERSION_2: &str = "/sys/fs/cgroup";

impl Drop for ReadLimit {
    fn drop(&mut self) {
        // The kernel refuses for a moment after the last process has gone.
        let removed = crate::wait_until(crate::DEADLINE, || fs::remove_dir(&self.group).ok());
        if removed.is_none() {
            eprintln!("the cgroup {} stays behind", self.group.display());
        }
    }
}

/// The whole disk, as MAJOR:MINOR, that holds the file system of a file.
fn disk_below(file: &Path) -> Result<String, String> {
    let device = fs::metadata(file).map_err(|error| error.to_string())?.dev();
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    let node = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let node = fs::canonicalize(&node).map_err(|_| "its file system lies on no single disk".to_owned())?;
    let whole = if node.join("partition").exists() { node.parent().unwrap_or(&node) } else { &node };
    Ok(read(&whole.join("dev"))?.trim().to_owned())
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}
