//! The kinds of memory that QEMU can keep guest RAM in.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::Error;
use crate::hugepages::Hugepages;

/// Where guest RAM lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Plain `-m`: private anonymous memory.
    Default,
    /// `memory-backend-ram`: the same by name.
    Ram,
    /// `memory-backend-ram,share=on`: shared anonymous memory.
    RamShared,
    /// `memory-backend-memfd`.
    Memfd,
    /// A file on tmpfs, shared.
    File,
    /// A file on tmpfs, private: what the guest writes never reaches it.
    FilePrivate,
    /// A file on a disk, shared.
    FileOnDisk,
    /// `memory-backend-memfd` of 2 MiB huge pages.
    Hugetlb,
}

/// What a backend holds on this host for one VM; given back when dropped.
pub(crate) struct Held {
    directory: Option<TempDir>,
    _hugepages: Option<Hugepages>,
}

impl Backend {
    /// Every kind, for tests that loop over them.
    pub const ALL: [Backend; 8] = [
        Backend::Default,
        Backend::Ram,
        Backend::RamShared,
        Backend::Memfd,
        Backend::File,
        Backend::FilePrivate,
        Backend::FileOnDisk,
        Backend::Hugetlb,
    ];

    /// Reserves what one VM with this much RAM needs. Fails with [`Error::Missing`] where huge pages can't be had.
    pub(crate) fn hold(self, ram_mib: u64, scratch: &Path) -> Result<Held, Error> {
        let parent = match self {
            Backend::File | Backend::FilePrivate => Some(Path::new("/dev/shm")),
            Backend::FileOnDisk => Some(scratch),
            _ => None,
        };
        let directory = parent
            .map(|parent| tempfile::Builder::new().prefix("whimbrel-ram-").tempdir_in(parent))
            .transpose()
            .map_err(Error::io("can't make a directory for guest RAM"))?;
        let hugepages = (self == Backend::Hugetlb).then(|| Hugepages::reserve(ram_mib / 2)).transpose()?;
        Ok(Held { directory, _hugepages: hugepages })
    }

    /// QEMU's options.
    pub(crate) fn arguments(self, ram_mib: u64, held: &Held) -> Vec<String> {
        let size = format!("id=ram,size={ram_mib}M");
        let object = match self {
            Backend::Default => return vec![],
            Backend::Ram => format!("memory-backend-ram,{size}"),
            Backend::RamShared => format!("memory-backend-ram,{size},share=on"),
            Backend::Memfd => format!("memory-backend-memfd,{size},share=on"),
            Backend::Hugetlb => format!("memory-backend-memfd,{size},share=on,hugetlb=on,hugetlbsize=2M"),
            Backend::File | Backend::FileOnDisk => {
                format!("memory-backend-file,{size},share=on,mem-path={}", held.file().display())
            }
            Backend::FilePrivate => {
                format!("memory-backend-file,{size},share=off,mem-path={}", held.file().display())
            }
        };
        ["-object", &object, "-machine", "memory-backend=ram"].map(str::to_owned).into()
    }
}

impl Held {
    fn file(&self) -> PathBuf {
        self.directory.as_ref().expect("file backends hold a directory").path().join("ram")
    }
}
