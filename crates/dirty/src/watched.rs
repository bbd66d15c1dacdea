//! A region of the VM's memory, and what its kind of memory means by a page that isn't mapped.

use crate::hint::Hint;
use ram::pagemap::{Stretch, category};
use ram::{Backing, BlockId, PAGE, Process, Region, Run, Store};
use std::ops::Range;

/// A region and how its memory behaves.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) block: BlockId,
    pub(crate) first_page: u64,
    pub(crate) pages: u64,
    pub(crate) host: u64,
    pub(crate) page_bytes: u64,
    /// Addresses to register and protect: the region in whole pages of its backing.
    pub(crate) addresses: Range<u64>,
    pub(crate) memory: Memory,
    /// Tells when something may have been discarded from its file.
    pub(crate) hint: Hint,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// A page that isn't there is zero.
    Anonymous,
    /// A page that isn't there shows the file.
    PrivateFile,
    /// The file is the memory.
    Shared,
    /// Huge pages; a page that isn't there is never reported as written.
    Huge { shared: bool },
}

impl Watched {
    pub(crate) fn new(region: &Region, ram: &Process) -> Self {
        let memory = match &region.backing {
            Backing::Anonymous => Memory::Anonymous,
            Backing::PrivateFile(file) => huge(file.store, false).unwrap_or(Memory::PrivateFile),
            Backing::Shared(file) => huge(file.store, true).unwrap_or(Memory::Shared),
        };
        let page_bytes = match &region.backing {
            Backing::PrivateFile(file) | Backing::Shared(file) => file.store.page_bytes(),
            Backing::Anonymous => PAGE as u64,
        };
        let end = region.host + region.pages * PAGE as u64;
        Self {
            block: region.block,
            first_page: region.first_page,
            pages: region.pages,
            host: region.host,
            page_bytes,
            addresses: region.host..end.next_multiple_of(page_bytes),
            memory,
            hint: match (&region.backing, ram.file(region)) {
                (Backing::Shared(file), Some((opened, _))) => Hint::new(opened, &file.name),
                _ => Hint::none(),
            },
        }
    }

    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.memory, Memory::Shared | Memory::Huge { shared: true })
    }

    pub(crate) fn run(&self) -> Run {
        Run { first: self.first_page, count: self.pages }
    }

    /// Pages of the block at these addresses. The last huge page may reach beyond the block.
    pub(crate) fn run_of(&self, stretch: Stretch) -> Run {
        let page = |address: u64| (address - self.host) / PAGE as u64;
        let (first, end) = (page(stretch.start), page(stretch.end).min(self.pages));
        Run { first: self.first_page + first, count: end.saturating_sub(first) }
    }

    pub(crate) fn chunks(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        chunks(self.addresses.clone())
    }
}

impl Memory {
    /// Whether a page that holds data is the VM's own, and not one of a file that a private mapping shows.
    pub(crate) fn is_own(self, categories: u64) -> bool {
        self != Self::PrivateFile || categories & category::FILE == 0
    }

    /// What a written page is. `sorted` says whether its categories tell.
    pub(crate) fn is(self, categories: u64, sorted: bool) -> Is {
        match self {
            Self::Huge { .. } => Is::Data,
            Self::Anonymous if !sorted || holds_data(categories) => Is::Data,
            Self::Anonymous => Is::Hole,
            Self::Shared | Self::PrivateFile if sorted && holds_data(categories) => Is::Data,
            Self::Shared | Self::PrivateFile => Is::Unmapped,
        }
    }
}

pub(crate) enum Is {
    Data,
    Hole,
    /// Only the file knows.
    Unmapped,
}

fn huge(store: Store, shared: bool) -> Option<Memory> {
    matches!(store, Store::Hugetlb { .. }).then_some(Memory::Huge { shared })
}

/// Cuts addresses into what one call may clear.
pub(crate) fn chunks(addresses: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let Range { start, end } = addresses;
    let mut from = start;
    std::iter::from_fn(move || {
        let to = (from + 1).next_multiple_of(CALL_BYTES).min(end);
        let chunk = (from < end).then_some(from..to);
        from = to;
        chunk
    })
}

/// A swapped page holds data when it was written, which the marker of a protected hole never was.
pub(crate) fn holds_data(categories: u64) -> bool {
    let present = categories & category::PRESENT != 0 && categories & category::ZERO == 0;
    present || categories & category::SWAPPED != 0
}

/// vCPU faults in a range are retried while a call clears it, which takes 0.1 ms for this much.
const CALL_BYTES: u64 = 128 << 20;
