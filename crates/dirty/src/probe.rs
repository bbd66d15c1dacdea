//! Tries out on memory of our own what this kernel reports. Versions tell little: fixes were carried to stable
//! kernels out of order.

#![expect(unsafe_code, reason = "maps and discards scratch memory")]

use ram::PAGE;
use ram::pagemap::{Pagemap, Query, Stretch, category};
use ram::uffd::Uffd;
use std::io;
use std::ops::Range;
use std::ptr::null_mut;

/// What this kernel reports of private memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probes {
    /// A discarded 4 KiB page counts as written in every kind of scan, so one scan can both clear and classify.
    pub hole_is_written: bool,
    /// Discarding 2 MiB of 4 KiB pages is reported.
    pub zap_is_reported: bool,
    /// Discarding a huge page is reported. `None` if there was no huge page to be had.
    pub huge_zap_is_reported: Option<bool>,
}

impl Probes {
    /// Asks the kernel that runs us.
    pub fn run() -> io::Result<Self> {
        Ok(Self {
            hole_is_written: hole_is_written()?,
            zap_is_reported: zap_is_reported(libc::MADV_NOHUGEPAGE)?.unwrap_or(false),
            huge_zap_is_reported: zap_is_reported(libc::MADV_HUGEPAGE)?,
        })
    }

    /// Whether discards have to be looked for by an additional scan. What could not be tried out is distrusted.
    pub fn needs_hole_scan(&self) -> bool {
        !self.zap_is_reported || self.huge_zap_is_reported != Some(true)
    }
}

fn hole_is_written() -> io::Result<bool> {
    let scratch = Scratch::armed(libc::MADV_NOHUGEPAGE)?;
    scratch.discard(PAGE..2 * PAGE);
    // To report more than WRITTEN takes the kernel through its general loop.
    let written = scratch.written(category::WRITTEN | category::PRESENT)?;
    Ok(written == PAGE)
}

/// `None` if huge pages were asked for and not to be had.
fn zap_is_reported(advice: i32) -> io::Result<Option<bool>> {
    let scratch = Scratch::armed(advice)?;
    if advice == libc::MADV_HUGEPAGE && !scratch.is_huge()? {
        return Ok(None);
    }
    scratch.discard(0..HUGE_BYTES);
    Ok(Some(scratch.written(category::WRITTEN)? == HUGE_BYTES))
}

/// 2 MiB of private memory on a boundary of 2 MiB, touched and protected.
struct Scratch {
    area: *mut libc::c_void,
    at: usize,
    pagemap: Pagemap,
    _uffd: Uffd,
}

impl Scratch {
    fn armed(advice: i32) -> io::Result<Self> {
        let uffd = Uffd::own()?;
        let pagemap = Pagemap::own()?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let area = unsafe { libc::mmap(null_mut(), 2 * HUGE_BYTES, protection, flags, -1, 0) };
        if area == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = (area as usize).next_multiple_of(HUGE_BYTES);
        let scratch = Self { area, at, pagemap, _uffd: uffd };
        // SAFETY: 2 MiB that lie inside the area, which is 4 MiB and only ours.
        unsafe {
            libc::madvise(at as *mut libc::c_void, HUGE_BYTES, advice);
            std::ptr::write_bytes(at as *mut u8, 1, HUGE_BYTES);
        }
        scratch._uffd.register(scratch.range())?;
        scratch.pagemap.protect(scratch.range())?;
        Ok(scratch)
    }

    fn range(&self) -> Range<u64> {
        self.at as u64..(self.at + HUGE_BYTES) as u64
    }

    fn discard(&self, bytes: Range<usize>) {
        let at = (self.at + bytes.start) as *mut libc::c_void;
        // SAFETY: inside the scratch memory, which holds nothing that anyone wants.
        unsafe { libc::madvise(at, bytes.len(), libc::MADV_DONTNEED) };
    }

    /// Bytes that a scan reports as written.
    fn written(&self, report: u64) -> io::Result<usize> {
        self.count(Query { all: category::WRITTEN, report, ..Query::default() })
    }

    fn is_huge(&self) -> io::Result<bool> {
        let huge = Query { all: category::HUGE, report: category::HUGE, ..Query::default() };
        Ok(self.count(huge)? == HUGE_BYTES)
    }

    fn count(&self, query: Query) -> io::Result<usize> {
        let (mut bytes, mut room) = (0, [Stretch::default(); 64]);
        self.pagemap.scan(self.range(), query, &mut room, |stretch| {
            bytes += (stretch.end - stretch.start) as usize
        })?;
        Ok(bytes)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: mapped in `armed`, used by nothing else.
        unsafe { libc::munmap(self.area, 2 * HUGE_BYTES) };
    }
}

const HUGE_BYTES: usize = 2 << 20;
