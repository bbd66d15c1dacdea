//! Whether a guest page is all zero, at the speed that memory can be read. The guest may write meanwhile: an
//! answer holds for bytes that were there at some moment, and a later dirty round catches what came after. Knows
//! nothing of what is done with the answer.

#![expect(unsafe_code, reason = "vector loads through raw pointers to live guest RAM")]

#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

use ram::{PAGE, Span};

/// A way to check a page that this CPU has. Chosen once and passed along.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// For the log: the instructions it uses.
    pub name: &'static str,
    /// Needs a pointer to PAGE readable bytes on a boundary of [`ALIGNMENT`], and a CPU that passed `runs_here`.
    check: unsafe fn(*const u8) -> bool,
    runs_here: fn() -> bool,
}

impl Kernel {
    /// The fastest that this CPU has.
    pub fn best() -> Self {
        Self::all().next().unwrap_or(scalar::KERNEL)
    }

    /// All that this CPU has, the fastest first, the scalar one last.
    pub fn all() -> impl Iterator<Item = Self> {
        KERNELS.into_iter().filter(|kernel| (kernel.runs_here)())
    }

    /// Whether every byte of a page is zero. Panics unless `page` is [`PAGE`] bytes on a 64-byte boundary, as
    /// every page of guest RAM is.
    pub fn is_zero(self, page: Span<'_>) -> bool {
        let at = page.as_ptr();
        assert!(page.len() == PAGE && at.addr().is_multiple_of(ALIGNMENT), "{} bytes at {at:p}", page.len());
        // SAFETY: a span is readable for its length, and a kernel is only handed out where it runs.
        SAMPLES.iter().all(|&sample| unsafe { is_zero_word(at, sample) }) && unsafe { (self.check)(at) }
    }
}

/// Whether the word that starts at byte `offset` is zero.
///
/// # Safety
/// `page` is readable for PAGE bytes and aligned for a word, and `offset` is that of a word in it.
unsafe fn is_zero_word(page: *const u8, offset: usize) -> bool {
    // SAFETY: as the caller promises. Volatile, since the guest may write the word right now.
    unsafe { page.add(offset).cast::<u64>().read_volatile() == 0 }
}

#[cfg(target_arch = "x86_64")]
const KERNELS: [Kernel; 4] = [x86::AVX512, x86::AVX2, x86::SSE2, scalar::KERNEL];
#[cfg(target_arch = "aarch64")]
const KERNELS: [Kernel; 2] = [neon::KERNEL, scalar::KERNEL];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const KERNELS: [Kernel; 1] = [scalar::KERNEL];

/// Looked at ahead of the whole page. Most pages that hold data show it here, at the cost of one cache line
/// instead of a loop: headers stand first, stacks grow from the end, and a half-used page is full up to somewhere.
const SAMPLES: [usize; 3] = [0, PAGE / 2, PAGE - 8];

/// The widest vector, so that loads need no unaligned form and never cross a cache line.
const ALIGNMENT: usize = 64;

#[cfg(test)]
mod tests;
