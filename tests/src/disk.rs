//! Disks whose every block is known, shared by both ends of a pair as shared storage is.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use crate::Error;

/// A raw image behind a virtio-blk device. Clones share the image.
#[derive(Debug, Clone)]
pub struct Disk {
    image: Arc<Image>,
    cache: Cache,
    aio: Aio,
    options: String,
    device_bytes_per_second: Option<u64>,
}

/// QEMU's `cache=`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// `O_DIRECT`: the kernel writes into guest RAM behind the page tables' back.
    None,
    /// Through the host's page cache.
    Writeback,
}

/// QEMU's `aio=`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    /// `preadv` in threads.
    Threads,
    /// `io_submit`; needs [`Cache::None`].
    Native,
    /// `io_uring`.
    IoUring,
}

#[derive(Debug)]
struct Image {
    path: PathBuf,
    _directory: TempDir,
}

impl Disk {
    /// A disk of `mib` MiB with the content that the guest's `diocheck` expects. Fails without room in the
    /// scratch directory (`WHIMBREL_SCRATCH`, else /var/tmp).
    pub fn stamped(mib: u64) -> Result<Self, Error> {
        let directory = tempfile::Builder::new()
            .prefix("whimbrel-disk-")
            .tempdir_in(scratch())
            .map_err(Error::io(format!("can't make a directory in {}", scratch().display())))?;
        let path = directory.path().join("disk.raw");
        write_stamped(&path, mib << 20 >> 12)
            .map_err(Error::io(format!("can't write {}", path.display())))?;
        let image = Arc::new(Image { path, _directory: directory });
        Ok(Disk {
            image,
            cache: Cache::None,
            aio: Aio::Threads,
            options: String::new(),
            device_bytes_per_second: None,
        })
    }

    /// How the host caches it; [`Cache::None`] at first.
    pub fn cache(mut self, cache: Cache) -> Self {
        self.cache = cache;
        self
    }

    /// How QEMU reads it; [`Aio::Threads`] at first.
    pub fn aio(mut self, aio: Aio) -> Self {
        self.aio = aio;
        self
    }

    /// Further options of `-drive`, such as `throttling.bps-read=1000000`. QEMU's throttling holds a request
    /// back *before* the host's kernel sees it; see [`Disk::slow_device`] for the other kind.
    pub fn option(mut self, option: &str) -> Self {
        self.options.push_str(&format!(",{option}"));
        self
    }

    /// Slows the host's device for the source's QEMU, so that direct reads stay under way for long inside the
    /// kernel, with guest pages pinned. Needs root and the block controller of cgroups.
    pub fn slow_device(mut self, bytes_per_second: u64) -> Self {
        self.device_bytes_per_second = Some(bytes_per_second);
        self
    }

    /// What a stamped disk holds at byte `8 * at`.
    pub fn word(at: u64) -> [u8; 8] {
        mixed(at).to_le_bytes()
    }

    /// The image file.
    pub fn path(&self) -> &Path {
        &self.image.path
    }

    pub(crate) fn device_limit(&self) -> Option<u64> {
        self.device_bytes_per_second
    }

    /// QEMU's options, for the disk with this number.
    pub(crate) fn arguments(&self, number: usize) -> Vec<String> {
        let cache = match self.cache {
            Cache::None => "none",
            Cache::Writeback => "writeback",
        };
        let aio = match self.aio {
            Aio::Threads => "threads",
            Aio::Native => "native",
            Aio::IoUring => "io_uring",
        };
        let path = self.image.path.display();
        let drive =
            format!("if=none,id=disk{number},format=raw,cache={cache},aio={aio},file={path}{}", self.options);
        ["-drive".into(), drive, "-device".into(), format!("virtio-blk-pci,drive=disk{number}")].into()
    }
}

/// Where images and RAM files on a disk are put.
pub(crate) fn scratch() -> PathBuf {
    std::env::var_os("WHIMBREL_SCRATCH").unwrap_or_else(|| "/var/tmp".into()).into()
}

fn write_stamped(path: &Path, blocks: u64) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    for at in 0..blocks * 512 {
        file.write_all(&Disk::word(at))?;
    }
    file.into_inner().map_err(|error| error.into_error())?.sync_all()
}

/// The same function as in `guests/linux/check.h`.
fn mixed(at: u64) -> u64 {
    let x = (at ^ at >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
