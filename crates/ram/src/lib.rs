//! Guest RAM as the rest of the tree sees it: RAM blocks, sets of pages, and a way to reach pages of a VM
//! that runs in another process. Knows nothing of why a page is wanted, and nothing of QEMU.

mod block;
mod cached;
mod cursor;
mod extent;
mod foreign;
mod mapping;
pub mod pagemap;
mod populated;
mod process;
mod region;
mod set;
mod span;
pub mod uffd;

pub use block::{Block, BlockId, Layout, LayoutError};
pub use cursor::{Area, Batch, Cursor};
pub use process::Process;
pub use region::{Backing, File, Region, Store};
pub use set::{PageSet, PageSets, Run};
pub use span::{CopyBuf, Land, Pages, RamError, Reach, Room, Span, SpanMut, Window};

/// Bytes of the unit that migrates: the target page of x86-64, and of arm64 guests under QEMU's `virt` with
/// 4 KiB pages. Offsets on the wire are multiples of it.
pub const PAGE: usize = 4096;
