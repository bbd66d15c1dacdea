//! The guests that check themselves, and how to get them: each is built by its script under `guests/`, which
//! does nothing when it is built already.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Accel, Error};

/// What a VM boots.
#[derive(Debug, Clone)]
pub struct Guest {
    kind: Kind,
    append: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Multiboot,
    Linux,
}

/// The files of a guest that is built.
pub(crate) struct Image {
    pub kernel: PathBuf,
    pub initrd: Option<PathBuf>,
    /// Boots the kernel faster than QEMU's own does, in particular on a KVM that emulates firmware.
    pub firmware: Option<PathBuf>,
}

impl Guest {
    /// The bare-metal guest; `options` as in the head of `guests/multiboot/guest.c`, such as
    /// `pages=4096 dirty=1024 zero=1 rate=20000`.
    pub fn multiboot(options: &str) -> Self {
        Guest { kind: Kind::Multiboot, append: options.to_owned() }
    }

    /// Linux, running these workloads: `memcheck`, `diocheck`, `discardcheck`, `redis`; `options` as in the
    /// head of `guests/linux/init.c`.
    pub fn linux(workloads: &[&str], options: &str) -> Self {
        // Without a kernel log on the console no line of it can fall into a heartbeat.
        let append =
            format!("console=ttyS0 quiet loglevel=1 panic=-1 whimbrel.run={} {options}", workloads.join(","));
        Guest { kind: Kind::Linux, append }
    }

    /// The kernel command line.
    pub fn append(&self) -> &str {
        &self.append
    }

    /// The names under which heartbeats come.
    pub fn workloads(&self) -> Vec<String> {
        match self.kind {
            Kind::Multiboot => vec![String::new()],
            Kind::Linux => {
                let list = self.append.split("whimbrel.run=").nth(1).unwrap_or_default();
                let list = list.split(' ').next().unwrap_or_default();
                list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
            }
        }
    }

    /// The least RAM, in MiB, that it does well with.
    pub(crate) fn ram_mib(&self) -> u64 {
        match self.kind {
            Kind::Multiboot => 64,
            Kind::Linux => LINUX_RAM_MIB,
        }
    }

    /// Fails where this machine can't run it. A KVM in software emulates most of a kernel, and Linux takes many
    /// minutes to boot there; the bare-metal guest lives in ring 3, which even such a KVM runs at full speed.
    pub(crate) fn check(&self, accel: Accel) -> Result<(), Error> {
        let is_hardware =
            || ["kvm_intel", "kvm_amd"].iter().any(|module| Path::new("/sys/module").join(module).exists());
        if self.kind == Kind::Linux && accel == Accel::Kvm && !is_hardware() {
            return Err(Error::missing("this machine's KVM works in software and is too slow to boot Linux"));
        }
        Ok(())
    }

    /// Builds it where needed. Fails with [`Error::Missing`] if this machine lacks what that takes.
    pub(crate) fn image(&self) -> Result<Image, Error> {
        let directory = match self.kind {
            Kind::Multiboot => "multiboot",
            Kind::Linux => "linux",
        };
        let files = build(directory)?;
        let [kernel, second] = <[PathBuf; 2]>::try_from(files).expect("a build script prints two files");
        Ok(match self.kind {
            Kind::Multiboot => Image { kernel, initrd: None, firmware: Some(second) },
            Kind::Linux => Image { kernel, initrd: Some(second), firmware: None },
        })
    }
}

/// Linux reports few free pages when it has little more free than our workloads use; tried at 512 MiB.
const LINUX_RAM_MIB: u64 = 768;

/// Runs a build script; gives the files that it prints.
fn build(directory: &str) -> Result<Vec<PathBuf>, Error> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("guests").join(directory).join("build.sh");
    let output =
        Command::new(&script).output().map_err(Error::io(format!("can't run {}", script.display())))?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect()),
        Some(EXIT_MISSING) => Err(Error::missing(text.trim().to_owned())),
        _ => Err(Error::Build { script, output: text }),
    }
}

/// How a build script says that the machine lacks something.
const EXIT_MISSING: i32 = 77;
