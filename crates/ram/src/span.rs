//! Where pages can be read and written while the guest runs. A page is lent as a raw span, never as a slice:
//! the guest may change its bytes at any moment.

#![expect(unsafe_code, reason = "spans point into memory that a running guest shares with us")]

use crate::{Batch, BlockId, PAGE, PageSets, Run};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Bytes that may be read and that may change while they are.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Span<'a> {
    at: NonNull<u8>,
    len: usize,
    lent: PhantomData<&'a ()>,
}

// SAFETY: a span is a promise of readable memory, which holds on any thread.
unsafe impl Send for Span<'_> {}
// SAFETY: as above.
unsafe impl Sync for Span<'_> {}

impl<'a> Span<'a> {
    /// # Safety
    /// `at` must stay readable for `len` bytes for `'a`.
    pub unsafe fn new(at: NonNull<u8>, len: usize) -> Self {
        Self { at, len, lent: PhantomData }
    }

    /// The first byte.
    pub fn as_ptr(self) -> *const u8 {
        self.at.as_ptr()
    }

    /// How many bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Copies the bytes as they are now. Panics if the lengths differ.
    pub fn copy_to(self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len);
        // SAFETY: `self` is readable for `len` bytes by the promise of `new`, `to` is a slice of that length.
        unsafe { std::ptr::copy_nonoverlapping(self.as_ptr(), to.as_mut_ptr(), self.len) }
    }
}

impl<'a> From<&'a [u8]> for Span<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { at: NonNull::from(bytes).cast(), len: bytes.len(), lent: PhantomData }
    }
}

/// Bytes that may be written.
#[derive(Debug)]
#[repr(C)]
pub struct SpanMut<'a> {
    at: NonNull<u8>,
    len: usize,
    lent: PhantomData<&'a mut ()>,
}

// SAFETY: a span is a promise of writable memory, which holds on any thread.
unsafe impl Send for SpanMut<'_> {}

impl<'a> SpanMut<'a> {
    /// # Safety
    /// `at` must stay writable for `len` bytes for `'a`.
    pub unsafe fn new(at: NonNull<u8>, len: usize) -> Self {
        Self { at, len, lent: PhantomData }
    }

    /// The first byte.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<'a> From<&'a mut [u8]> for SpanMut<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self { len: bytes.len(), at: NonNull::from(bytes).cast(), lent: PhantomData }
    }
}

/// Reaching the pages of a VM for reading, at the source.
///
/// # Safety
/// A pointer that `locate` appends stays readable for [`PAGE`] bytes while `self` and `copy` are borrowed.
pub unsafe trait Reach: Send + Sync {
    /// Appends to `at` where each page of `batch` can be read, in its order. A page of a private block is copied
    /// into `copy` first, slot by slot in the order of the batch; a page of a mapped block is not.
    fn locate(&self, batch: &Batch, copy: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError>;

    /// Puts into `into` every page that may hold data now. Reads no page, allocates none in the VM.
    fn populated(&self, into: &mut PageSets) -> Result<(), RamError>;
}

/// Putting pages in place in a VM that does not run yet, at the target.
///
/// # Safety
/// A pointer that `room` appends stays writable for [`PAGE`] bytes while `self` and `copy` are borrowed.
pub unsafe trait Land: Send + Sync {
    /// Appends to `at` where each page of `batch` is to be received: in place, or in `copy`.
    fn room(&self, batch: &Batch, copy: &mut CopyBuf, at: &mut Vec<NonNull<u8>>) -> Result<(), RamError>;

    /// Puts the pages that were received into `copy` in place. Nothing to do for a mapped block.
    fn settle(&self, batch: &Batch, copy: &CopyBuf) -> Result<(), RamError>;

    /// Makes pages read as zero, giving their memory back where that can be done.
    fn zero(&self, block: BlockId, run: Run) -> Result<(), RamError>;
}

/// A channel's own buffer of whole pages, on a page boundary. Allocated once.
#[derive(Debug)]
pub struct CopyBuf {
    at: NonNull<u8>,
    pages: usize,
}

// SAFETY: the buffer is owned memory like a `Vec`.
unsafe impl Send for CopyBuf {}
// SAFETY: as above; `&CopyBuf` gives nothing but pointers.
unsafe impl Sync for CopyBuf {}

impl CopyBuf {
    /// Room for `pages` pages; at least one.
    pub fn new(pages: usize) -> Self {
        assert!(pages > 0, "a copy buffer holds at least one page");
        let layout = Self::layout(pages);
        // SAFETY: the layout has a size above zero.
        let at = unsafe { alloc_zeroed(layout) };
        Self { at: NonNull::new(at).unwrap_or_else(|| handle_alloc_error(layout)), pages }
    }

    /// Where page `slot` of the buffer starts. Panics beyond the end.
    pub fn slot(&self, slot: usize) -> NonNull<u8> {
        assert!(slot < self.pages, "slot {slot} of {}", self.pages);
        // SAFETY: the slot was just checked to lie inside the allocation.
        unsafe { self.at.add(slot * PAGE) }
    }

    /// How many pages fit.
    pub fn pages(&self) -> usize {
        self.pages
    }

    fn layout(pages: usize) -> Layout {
        Layout::from_size_align(pages * PAGE, PAGE).expect("a buffer of a few pages")
    }
}

impl Drop for CopyBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.at.as_ptr(), Self::layout(self.pages)) }
    }
}

/// What a channel looks at guest RAM through: its copy buffer, and where the pages of the batch at hand are.
#[derive(Debug)]
pub struct Window {
    copy: CopyBuf,
    at: Vec<NonNull<u8>>,
}

// SAFETY: the pointers are only handed out under the borrow of `load` and `open`.
unsafe impl Send for Window {}

impl Window {
    /// A window of at most `pages_max` pages.
    pub fn new(pages_max: usize) -> Self {
        Self { copy: CopyBuf::new(pages_max), at: Vec::with_capacity(pages_max) }
    }

    /// The pages of `batch`, to be read.
    pub fn load<'a, R: Reach + ?Sized>(
        &'a mut self,
        ram: &'a R,
        batch: &Batch,
    ) -> Result<Pages<'a>, RamError> {
        self.at.clear();
        ram.locate(batch, &mut self.copy, &mut self.at)?;
        assert_eq!(self.at.len(), batch.pages.len(), "a page for every entry of the batch");
        Ok(Pages { at: &self.at })
    }

    /// Where the pages of `batch` are to be received. [`Land::settle`] must follow, by [`Window::settle`].
    pub fn open<'a, L: Land + ?Sized>(&'a mut self, ram: &'a L, batch: &Batch) -> Result<Room<'a>, RamError> {
        self.at.clear();
        ram.room(batch, &mut self.copy, &mut self.at)?;
        assert_eq!(self.at.len(), batch.pages.len(), "a page for every entry of the batch");
        Ok(Room { at: &self.at })
    }

    /// Puts in place what was received since [`Window::open`].
    pub fn settle<L: Land + ?Sized>(&self, ram: &L, batch: &Batch) -> Result<(), RamError> {
        ram.settle(batch, &self.copy)
    }
}

/// The pages of a batch, readable.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    at: &'a [NonNull<u8>],
}

impl<'a> Pages<'a> {
    /// The page at this place in the batch.
    pub fn page(self, place: usize) -> Span<'a> {
        // SAFETY: `Reach::locate` promises PAGE readable bytes while the window and the RAM are borrowed, for 'a.
        unsafe { Span::new(self.at[place], PAGE) }
    }

    /// Appends the pages at `places` as spans, neighbours in memory as one.
    pub fn gather(self, places: impl IntoIterator<Item = usize>, spans: &mut Vec<Span<'a>>) {
        for (at, len) in neighbours(self.at, places) {
            // SAFETY: as in `page`, for each page of the stretch.
            spans.push(unsafe { Span::new(at, len) });
        }
    }
}

/// The places of a batch, writable.
#[derive(Debug)]
pub struct Room<'a> {
    at: &'a [NonNull<u8>],
}

impl<'a> Room<'a> {
    /// Appends every place as a span, neighbours in memory as one.
    pub fn gather(self, spans: &mut Vec<SpanMut<'a>>) {
        for (at, len) in neighbours(self.at, 0..self.at.len()) {
            // SAFETY: `Land::room` promises PAGE writable bytes for each while window and RAM are borrowed.
            spans.push(unsafe { SpanMut::new(at, len) });
        }
    }
}

fn neighbours(
    at: &[NonNull<u8>],
    places: impl IntoIterator<Item = usize>,
) -> impl Iterator<Item = (NonNull<u8>, usize)> {
    let mut places = places.into_iter().map(|place| at[place]).peekable();
    std::iter::from_fn(move || {
        let first = places.next()?;
        let mut len = PAGE;
        while places.next_if(|next| next.as_ptr() as usize == first.as_ptr() as usize + len).is_some() {
            len += PAGE;
        }
        Some((first, len))
    })
}

/// Why guest RAM could not be reached.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum RamError {
    #[error("cannot {what} {bytes} bytes of RAM block {block} at offset {offset:#x} in the VM's process")]
    Access { what: &'static str, block: String, offset: u64, bytes: usize, source: std::io::Error },
    #[error("cannot map RAM block {block} from {path}")]
    Map { block: String, path: String, source: std::io::Error },
    #[error("cannot tell which pages of RAM block {block} hold data")]
    Populated { block: String, source: std::io::Error },
    #[error("the VM's process {pid} is gone")]
    Gone { pid: i32 },
    #[error(
        "not allowed to open {path} of RAM block {block} for reading and writing: \
         it takes CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN, and CAP_DAC_OVERRIDE where another user owns it"
    )]
    Forbidden { block: String, path: String, source: std::io::Error },
    #[error("cannot read the page map of process {pid}: it takes CAP_SYS_PTRACE, or the VM's own user")]
    Pagemap { pid: i32, source: std::io::Error },
    #[error("cannot watch our own mapping of guest RAM by userfaultfd: it takes Linux 6.7, on arm64 6.10")]
    Watch { source: std::io::Error },
    #[error("RAM block {block} is not known from page {page} of {pages}")]
    Cover { block: String, page: u64, pages: u64 },
    #[error("this host has pages of {bytes} bytes; only {PAGE} is supported")]
    PageSize { bytes: i64 },
}
