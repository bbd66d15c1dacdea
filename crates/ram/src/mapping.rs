//! Shared memory of a VM, mapped by us as well. At the source it is mapped for reading, and watched for pages
//! that go away under us: a page that we read and no longer have mapped was discarded in between.

#![expect(unsafe_code, reason = "maps files, and writes zeros through the mapping")]

use crate::extent::{Extents, next_data};
use crate::uffd::Uffd;
use crate::{File, PAGE, Region, Store};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

/// A region's file, mapped.
#[derive(Debug)]
pub(crate) struct Mapping {
    file: fs::File,
    store: Store,
    /// Offset in the file of the region's first byte.
    offset: u64,
    bytes: usize,
    at: NonNull<u8>,
    _area: Area,
    /// What has been made ready, by [`CHUNK_BYTES`] of the file.
    chunks: Box<[OnceLock<Result<(), i32>>]>,
}

// SAFETY: the mapping is shared memory that lives as long as `self`; all that is handed out are raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps what is behind `region` for reading. The descriptor is opened for writing too, since the kernel
    /// registers a shared mapping with userfaultfd only if it could be written.
    pub(crate) fn source(region: &Region, file: &File) -> io::Result<Self> {
        Self::new(region, file, libc::PROT_READ)
    }

    /// Maps what is behind `region` for writing.
    pub(crate) fn target(region: &Region, file: &File) -> io::Result<Self> {
        Self::new(region, file, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn new(region: &Region, from: &File, protection: i32) -> io::Result<Self> {
        let file = fs::File::options().read(true).write(true).open(&from.path)?;
        let bytes = region.pages as usize * PAGE;
        let align = match from.store {
            Store::Hugetlb { page_bytes } => page_bytes.max(CHUNK_BYTES),
            _ => CHUNK_BYTES,
        } as usize;
        let area = Area::reserve(bytes.next_multiple_of(align) + 2 * align)?;
        // Memory and file agree in the low bits, so that huge pages of the file can be mapped as such.
        let start = (area.at.as_ptr() as usize).next_multiple_of(align) + from.offset as usize % align;
        let at = NonNull::new(start as *mut u8).expect("an address inside the area");
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the stretch lies inside the area just reserved, which nothing else uses.
        let mapped = unsafe {
            libc::mmap(at.as_ptr().cast(), bytes, protection, flags, file.as_raw_fd(), from.offset as i64)
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let chunks = (from.offset % CHUNK_BYTES + bytes as u64).div_ceil(CHUNK_BYTES);
        let chunks = (0..chunks).map(|_| OnceLock::new()).collect();
        Ok(Self { file, store: from.store, offset: from.offset, bytes, at, _area: area, chunks })
    }

    /// Where a page of the region is, counted from the region's first.
    pub(crate) fn page(&self, page: u64) -> NonNull<u8> {
        let offset = page as usize * PAGE;
        assert!(offset < self.bytes, "page {page} of a mapping of {} bytes", self.bytes);
        // SAFETY: just checked to lie inside the mapping.
        unsafe { self.at.add(offset) }
    }

    /// The file.
    pub(crate) fn file(&self) -> &fs::File {
        &self.file
    }

    /// Our addresses of pages of the region.
    pub(crate) fn addresses(&self, pages: Range<u64>) -> Range<u64> {
        let base = self.base();
        base + pages.start * PAGE as u64..base + pages.end * PAGE as u64
    }

    /// Offsets in the file of pages of the region.
    pub(crate) fn offsets(&self, pages: Range<u64>) -> Range<u64> {
        self.offset + pages.start * PAGE as u64..self.offset + pages.end * PAGE as u64
    }

    /// Makes the chunk that a page is in ready, once: maps the data of it in one go, which takes a fifth of the
    /// faults that it saves. At the source it is then watched.
    ///
    /// The order matters. Until a chunk is registered, a fault maps the neighbours of its page as well. That must
    /// not happen after a page of the chunk was read, or a page that was discarded and touched again would come
    /// back unnoticed. So everything that maps neighbours comes before registration, and every read after.
    pub(crate) fn ready(&self, page: u64, watch: Option<&Uffd>) -> io::Result<()> {
        let at = self.chunk_of(page);
        let state = self.chunks[at].get_or_init(|| {
            self.prepare(at, watch).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
        });
        state.map_err(io::Error::from_raw_os_error)
    }

    fn chunk_of(&self, page: u64) -> usize {
        let lead = self.offset % CHUNK_BYTES;
        ((lead + page * PAGE as u64) / CHUNK_BYTES) as usize
    }

    fn prepare(&self, chunk: usize, watch: Option<&Uffd>) -> io::Result<()> {
        let lead = self.offset % CHUNK_BYTES;
        let start = (chunk as u64 * CHUNK_BYTES).saturating_sub(lead);
        let end = ((chunk as u64 + 1) * CHUNK_BYTES - lead).min(self.bytes as u64);
        if let Store::Hugetlb { page_bytes } = self.store {
            // Its faults map one huge page and no neighbours, and its holes don't show in the file. Whole huge
            // pages only can be registered, so the first chunk to come registers everything.
            let bytes = (self.bytes as u64).next_multiple_of(page_bytes);
            return watch.map_or(Ok(()), |watch| watch.register(self.base()..self.base() + bytes));
        }
        self.populate(start..end)?;
        let Some(watch) = watch else { return Ok(()) };
        // A fault may still map a huge page, with 511 neighbours.
        let at = (self.base() + start) as *mut libc::c_void;
        // SAFETY: inside the mapping. Fails only where there are no huge pages at all.
        unsafe { libc::madvise(at, (end - start) as usize, libc::MADV_NOHUGEPAGE) };
        watch.register(self.base() + start..self.base() + end)
    }

    fn base(&self) -> u64 {
        self.at.as_ptr() as u64
    }

    /// Maps what has data in these bytes of the region: one page of each window, with which the kernel maps what
    /// else of the window is in the page cache.
    fn populate(&self, bytes: Range<u64>) -> io::Result<()> {
        let Range { start: mut from, end } = self.offset + bytes.start..self.offset + bytes.end;
        while let Some(data) = next_data(&self.file, from..end)? {
            let at = (self.base() + data - self.offset) as *mut libc::c_void;
            // SAFETY: inside the mapping. Nothing is lost if it fails: a page is then mapped when it is read.
            unsafe { libc::madvise(at, PAGE, libc::MADV_POPULATE_READ) };
            from = (data + 1).next_multiple_of(WINDOW_BYTES);
        }
        Ok(())
    }

    /// Makes pages of the region zero, at the target. Holes stay holes.
    pub(crate) fn zero(&self, pages: Range<u64>) -> io::Result<()> {
        match self.store {
            Store::Hugetlb { .. } => pages.into_iter().try_for_each(|page| self.blank_if_present(page)),
            _ => self.punch(pages),
        }
    }

    fn punch(&self, pages: Range<u64>) -> io::Result<()> {
        let Range { start, end } = self.offsets(pages);
        // Ten times cheaper than punching what is a hole already.
        if next_data(&self.file, start..end)?.is_none() {
            return Ok(());
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a system call without pointers.
        let rc = unsafe { libc::fallocate(self.file.as_raw_fd(), mode, start as i64, (end - start) as i64) };
        if rc == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EOPNOTSUPP) {
            return Err(error);
        }
        for data in Extents::new(&self.file, start..end) {
            let data = data?;
            self.blank((data.start - self.offset) as usize, (data.end - data.start) as usize);
        }
        Ok(())
    }

    /// Huge pages are never punched: with the page its reservation would go, and the guest's next touch of it
    /// would be a SIGBUS where the pool has no page to spare.
    fn blank_if_present(&self, page: u64) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        let mut bytes = [0; PAGE];
        // Reading a hole through the descriptor gives zeros and allocates nothing.
        self.file.read_exact_at(&mut bytes, self.offsets(page..page + 1).start)?;
        if bytes.iter().any(|&byte| byte != 0) {
            self.blank(page as usize * PAGE, PAGE);
        }
        Ok(())
    }

    fn blank(&self, from: usize, bytes: usize) {
        assert!(from + bytes <= self.bytes, "{bytes} bytes at {from} of a mapping of {}", self.bytes);
        // SAFETY: just checked to lie inside the mapping, which is writable at the target.
        unsafe { std::ptr::write_bytes(self.at.as_ptr().add(from), 0, bytes) }
    }
}

/// Address space that is ours, to place the mapping in. Everything in it goes when it is dropped.
#[derive(Debug)]
struct Area {
    at: NonNull<u8>,
    bytes: usize,
}

impl Area {
    fn reserve(bytes: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { at: NonNull::new(at.cast()).expect("mmap gives no null"), bytes })
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: reserved above; pointers into it don't outlive the `Mapping` that it is part of.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

/// A huge page of x86-64 and arm64, and four packets.
const CHUNK_BYTES: u64 = 2 << 20;

/// What the kernel maps around a page (`fault_around_bytes`, unless somebody changed it). To populate all of a chunk
/// instead makes the kernel look at each of its pages once more, which costs 0.3 us a page and not 0.17.
const WINDOW_BYTES: u64 = 64 << 10;
