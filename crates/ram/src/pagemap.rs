//! `PAGEMAP_SCAN`: asks the kernel about the pages of a process, and protects them in the same breath. Knows
//! addresses and categories, not RAM blocks.

#![expect(unsafe_code, reason = "an ioctl that takes pointers in a structure")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Bits of [`Stretch::categories`] and of a [`Query`] (include/uapi/linux/fs.h).
pub mod category {
    /// Written since it was last protected.
    pub const WRITTEN: u64 = 1 << 1;
    /// A page of a file, or of shared memory.
    pub const FILE: u64 = 1 << 2;
    /// A page is mapped here.
    pub const PRESENT: u64 = 1 << 3;
    /// A swap entry, a page under migration, or the marker that protects a hole.
    pub const SWAPPED: u64 = 1 << 4;
    /// The shared zero page.
    pub const ZERO: u64 = 1 << 5;
    /// Mapped by a huge page table entry.
    pub const HUGE: u64 = 1 << 6;
}

/// What to look for, and what to do with it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query {
    /// Protects every page found that is WRITTEN.
    pub protect: bool,
    /// Fails with EPERM where the memory isn't registered with a userfaultfd for asynchronous protection. Without it
    /// such memory is not protected, and nothing tells.
    pub registered: bool,
    /// Categories that are flipped before `all` and `any` are tested.
    pub inverted: u64,
    /// Categories a page must have all of.
    pub all: u64,
    /// Categories a page must have one of, if there are any.
    pub any: u64,
    /// Categories to report; neighbours that agree in these are one stretch.
    pub report: u64,
}

/// Neighbouring pages with equal categories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stretch {
    /// Address of the first page.
    pub start: u64,
    /// Address after the last page.
    pub end: u64,
    /// Those of [`Query::report`] that hold.
    pub categories: u64,
}

/// Room for what one call finds, for scans of whole blocks. Keep it and use it again.
pub fn room() -> Box<[Stretch]> {
    // Not zeroed: zeroed allocations are not resident, and a page that the kernel can't write its finds to costs
    // the dirty bits of that call.
    vec![Stretch { start: 1, end: 1, categories: 1 }; STRETCHES_MAX].into()
}

/// The page map of a process. It stays with that process's memory, also when the pid is used again.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

impl Pagemap {
    /// Opens the page map of a process. Takes the right to trace it.
    pub fn open(pid: i32) -> io::Result<Self> {
        Ok(Self { file: File::open(format!("/proc/{pid}/pagemap"))? })
    }

    /// Our own.
    pub fn own() -> io::Result<Self> {
        Ok(Self { file: File::open("/proc/self/pagemap")? })
    }

    /// Calls `each` with every stretch of `range` that the query finds. Returns the number of calls it took. A range
    /// that isn't mapped is no error: it finds nothing.
    ///
    /// Stretches come in ascending order. Of a query that protects, one may come again if it was written again.
    pub fn scan(
        &self,
        range: Range<u64>,
        query: Query,
        room: &mut [Stretch],
        mut each: impl FnMut(Stretch),
    ) -> io::Result<u64> {
        assert!((1..=STRETCHES_MAX).contains(&room.len()), "room for {} stretches", room.len());
        let (mut from, mut told, mut calls) = (range.start, range.start, 0);
        while from < range.end {
            let mut arg = Arg::new(from..range.end, query);
            arg.vec = room.as_mut_ptr() as u64;
            arg.vec_len = room.len() as u64;
            let found = self.call(&mut arg)?;
            calls += 1;
            for &stretch in &room[..found] {
                let start = if query.protect { stretch.start } else { stretch.start.max(told) };
                if start < stretch.end {
                    each(Stretch { start, ..stretch });
                    told = stretch.end;
                }
            }
            if arg.walk_end <= from {
                return Err(stuck(from));
            }
            from = arg.walk_end;
        }
        Ok(calls)
    }

    /// Protects every page of the range, holes too, and reports nothing.
    pub fn protect(&self, range: Range<u64>) -> io::Result<()> {
        let mut arg = Arg::new(range.clone(), Query { protect: true, registered: true, ..Query::default() });
        self.call(&mut arg)?;
        if arg.walk_end < range.end { Err(stuck(arg.walk_end)) } else { Ok(()) }
    }

    fn call(&self, arg: &mut Arg) -> io::Result<usize> {
        // SAFETY: `arg` is the structure this request takes; `vec` is 0 or room that the caller
        // borrows mutably for the call, and `vec_len` its length.
        let found = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, arg as *mut Arg) };
        usize::try_from(found).map_err(|_| io::Error::last_os_error())
    }
}

fn stuck(at: u64) -> io::Error {
    io::Error::other(format!("PAGEMAP_SCAN does not get past {at:#x}"))
}

/// struct pm_scan_arg.
#[derive(Debug)]
#[repr(C)]
struct Arg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

impl Arg {
    fn new(range: Range<u64>, query: Query) -> Self {
        Self {
            size: size_of::<Self>() as u64,
            flags: u64::from(query.protect) * WP_MATCHING + u64::from(query.registered) * CHECK_WPASYNC,
            start: range.start,
            end: range.end,
            walk_end: 0,
            vec: 0,
            vec_len: 0,
            max_pages: 0,
            category_inverted: query.inverted,
            category_mask: query.all,
            category_anyof_mask: query.any,
            return_mask: query.report,
        }
    }
}

/// `_IOWR('f', 16, struct pm_scan_arg)`, equal on x86-64 and arm64.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;

const WP_MATCHING: u64 = 1;
const CHECK_WPASYNC: u64 = 2;

/// The kernel takes its locks anew for every 512 stretches. A call that it completes after that says that it ended
/// where it took them last, and what follows would be looked at twice.
const STRETCHES_MAX: usize = 512;
