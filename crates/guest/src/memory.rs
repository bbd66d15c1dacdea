//! The guest's memory: one private mapping that vCPUs write, and that channels read and fill. Keeps which pages were
//! ever given data and which were written since that was last asked; does not know what is in them.

#![expect(unsafe_code, reason = "maps memory and lends pages of it while it is written")]

use crate::marks::Marks;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};
use ram::{Batch, Block, BlockId, CopyBuf, Land, Layout, PAGE, PageSets, RamError, Reach, Run};
use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// The RAM of one guest: a single block.
#[derive(Debug)]
pub(crate) struct Memory {
    at: NonNull<u8>,
    layout: Layout,
    /// Pages that may hold data. All others read as zero and were never touched.
    touched: Marks,
    /// Pages written since they were last collected.
    written: Marks,
}

// SAFETY: the mapping is owned; it is written through atomics or by the kernel, and lent as raw pages only.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// The only RAM block.
pub(crate) const BLOCK: BlockId = BlockId(0);

/// Words of a page.
pub(crate) const WORDS: usize = PAGE / 8;

impl Memory {
    /// Untouched memory, which costs nothing yet. Fails if the layout isn't one block, or there is no room.
    pub fn new(ram_bytes: u64) -> io::Result<Self> {
        let block = Block { name: "guest.ram".into(), used_bytes: ram_bytes, page_bytes: PAGE as u64 };
        let layout = Layout::new(vec![block]).map_err(io::Error::other)?;
        let bytes = NonZeroUsize::new(ram_bytes as usize).expect("a layout has no empty block");
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(None, bytes, protection, flags) }?.cast();
        let pages = layout.pages();
        Ok(Self { at, layout, touched: Marks::new(pages), written: Marks::new(pages) })
    }

    /// Its one block.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The words of a page, for the vCPU that owns it. What it writes counts when it is noted.
    pub fn words(&self, page: u64) -> &[AtomicU64; WORDS] {
        // SAFETY: inside the mapping, aligned, and as long-lived as `self`; every other access is by the kernel or by
        // readers of raw pages, to whom words may change at any moment.
        unsafe { self.page(page).cast().as_ref() }
    }

    /// Notes that a page was written. To be called after the write: who collects the note then reads what was
    /// written, and a page that is read in between is collected again.
    pub fn note_written(&self, page: u64) {
        self.touched.set(page);
        self.written.set(page);
    }

    /// Forgets what was written so far.
    pub fn forget_written(&self) {
        self.written.clear();
    }

    /// Calls `found` with each page written since it was last collected.
    pub fn take_written(&self, found: impl FnMut(u64)) {
        self.written.take(found);
    }

    fn page(&self, page: u64) -> NonNull<u8> {
        assert!(page < self.layout.pages(), "page {page} of {}", self.layout.pages());
        // SAFETY: just checked to lie inside the mapping.
        unsafe { self.at.add(page as usize * PAGE) }
    }

    fn bytes(&self) -> usize {
        self.layout.pages() as usize * PAGE
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and nothing borrows it any more. Nothing is left to do if it fails.
        let _ = unsafe { munmap(self.at.cast::<c_void>(), self.bytes()) };
    }
}

// SAFETY: the pages lent are of the mapping, which lives as long as `self`.
unsafe impl Reach for Memory {
    fn locate(&self, batch: &Batch, _: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError> {
        at.extend(batch.pages.iter().map(|&page| self.page(page)));
        Ok(())
    }

    fn populated(&self, into: &mut PageSets) -> Result<(), RamError> {
        self.touched.read(&mut into[BLOCK]);
        Ok(())
    }
}

// SAFETY: as for `Reach`; the mapping is writable, and no vCPU runs while pages arrive.
unsafe impl Land for Memory {
    fn room(&self, batch: &Batch, _: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError> {
        batch.pages.iter().for_each(|&page| self.touched.set(page));
        at.extend(batch.pages.iter().map(|&page| self.page(page)));
        Ok(())
    }

    fn settle(&self, _: &Batch, _: &CopyBuf) -> Result<(), RamError> {
        Ok(())
    }

    fn zero(&self, _: BlockId, run: Run) -> Result<(), RamError> {
        let failed = |error: nix::Error| RamError::Access {
            what: "discard",
            block: self.layout.block(BLOCK).name.clone(),
            offset: run.first * PAGE as u64,
            bytes: run.count as usize * PAGE,
            source: error.into(),
        };
        assert!(run.end() <= self.layout.pages(), "pages to {} of {}", run.end(), self.layout.pages());
        let at = self.page(run.first).cast::<c_void>();
        // SAFETY: inside the mapping; what is lost is what is to become zero.
        unsafe { madvise(at, run.count as usize * PAGE, MmapAdvise::MADV_DONTNEED) }.map_err(failed)?;
        (run.first..run.end()).for_each(|page| self.touched.unset(page));
        Ok(())
    }
}
