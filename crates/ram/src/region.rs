//! Where the bytes of a RAM block sit in the process of its VM, and what is behind them.

use crate::BlockId;
use std::path::PathBuf;

/// A stretch of a RAM block as the VM's process has mapped it. The regions of a block cover it without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The block it belongs to.
    pub block: BlockId,
    /// Index in the block of its first page.
    pub first_page: u64,
    /// Number of pages.
    pub pages: u64,
    /// Address of the first byte in the VM's process.
    pub host: u64,
    /// What is behind the mapping.
    pub backing: Backing,
}

impl Region {
    /// Whether other processes can map the same memory.
    pub fn is_shared(&self) -> bool {
        matches!(self.backing, Backing::Shared(_))
    }
}

/// What is behind a mapping, as `/proc/PID/maps` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Private anonymous memory: only its own process can map it.
    Anonymous,
    /// A private mapping of a file: pages that were never written still show the file.
    PrivateFile(File),
    /// A shared mapping: memfd, shared anonymous memory, tmpfs, hugetlbfs or a disk file. We can map it too.
    Shared(File),
}

/// A file behind a mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// What to open: `/proc/PID/map_files/START-END`, which reaches deleted files and memfds as well.
    pub path: PathBuf,
    /// The name in `/proc/PID/maps`, for people.
    pub name: String,
    /// Offset in the file of the region's first byte.
    pub offset: u64,
    /// What keeps the file's pages.
    pub store: Store,
}

/// What keeps a file's pages; it decides how they are protected and how holes are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// tmpfs, memfd or shared anonymous memory.
    Shmem,
    /// Huge pages of this many bytes; also a memfd made with `MFD_HUGETLB`.
    Hugetlb {
        /// Bytes of a huge page.
        page_bytes: u64,
    },
    /// A file system with a disk, or anything else.
    Disk,
}

impl Store {
    /// Bytes of a page.
    pub fn page_bytes(self) -> u64 {
        match self {
            Self::Hugetlb { page_bytes } => page_bytes,
            Self::Shmem | Self::Disk => crate::PAGE as u64,
        }
    }
}
