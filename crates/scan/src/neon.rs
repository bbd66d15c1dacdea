//! The check for arm64: ORs 256 bytes together, then looks. Loads are volatile: the guest writes meanwhile, so
//! none may be done twice or put off.

use crate::Kernel;
use ram::PAGE;
use std::arch::aarch64::*;

/// Every arm64 CPU that Linux runs on has NEON; the target of the compiler takes it for granted.
pub(crate) const KERNEL: Kernel = Kernel { name: "neon", check: is_zero, runs_here: || true };

/// # Safety
/// `page` is readable for PAGE bytes and aligned for a vector.
#[target_feature(enable = "neon")]
unsafe fn is_zero(page: *const u8) -> bool {
    let vectors = page.cast::<uint8x16_t>();
    (0..PAGE / 16).step_by(16).all(|group| {
        // SAFETY: 16 groups of 16 vectors of 16 bytes are a page, which is readable as the caller promises.
        let load = |at: usize| unsafe { vectors.add(group + at).read_volatile() };
        let any = (1..16).fold(load(0), |any, at| vorrq_u8(any, load(at)));
        vmaxvq_u8(any) == 0
    })
}
