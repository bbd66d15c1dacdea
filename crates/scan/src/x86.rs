//! The checks for x86-64. Each ORs a group of vectors together and looks at the result once per group. Loads are
//! volatile: the guest writes meanwhile, so none may be done twice or put off.

use crate::Kernel;
use ram::PAGE;
use std::arch::x86_64::*;

pub(crate) const AVX512: Kernel =
    Kernel { name: "avx512", check: avx512, runs_here: || is_x86_feature_detected!("avx512f") };

pub(crate) const AVX2: Kernel =
    Kernel { name: "avx2", check: avx2, runs_here: || is_x86_feature_detected!("avx2") };

pub(crate) const SSE2: Kernel = Kernel { name: "sse2", check: sse2, runs_here: || true };

/// # Safety
/// `page` is readable for PAGE bytes and aligned for a vector; the CPU has AVX-512F.
#[target_feature(enable = "avx512f")]
unsafe fn avx512(page: *const u8) -> bool {
    let vectors = page.cast::<__m512i>();
    (0..PAGE / 64).step_by(8).all(|group| {
        // SAFETY: 8 groups of 8 vectors of 64 bytes are a page, which is readable as the caller promises.
        let load = |at: usize| unsafe { vectors.add(group + at).read_volatile() };
        let or = |one, other| _mm512_or_si512(one, other);
        let low = or(or(load(0), load(1)), or(load(2), load(3)));
        let high = or(or(load(4), load(5)), or(load(6), load(7)));
        let any = or(low, high);
        _mm512_test_epi64_mask(any, any) == 0
    })
}

/// # Safety
/// `page` is readable for PAGE bytes and aligned for a vector; the CPU has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn avx2(page: *const u8) -> bool {
    let vectors = page.cast::<__m256i>();
    (0..PAGE / 32).step_by(8).all(|group| {
        // SAFETY: 16 groups of 8 vectors of 32 bytes are a page, which is readable as the caller promises.
        let load = |at: usize| unsafe { vectors.add(group + at).read_volatile() };
        let or = |one, other| _mm256_or_si256(one, other);
        let low = or(or(load(0), load(1)), or(load(2), load(3)));
        let high = or(or(load(4), load(5)), or(load(6), load(7)));
        let any = or(low, high);
        _mm256_testz_si256(any, any) == 1
    })
}

/// # Safety
/// `page` is readable for PAGE bytes and aligned for a vector; the CPU has SSE2, as every x86-64 does.
#[target_feature(enable = "sse2")]
unsafe fn sse2(page: *const u8) -> bool {
    let vectors = page.cast::<__m128i>();
    (0..PAGE / 16).step_by(16).all(|group| {
        // SAFETY: 16 groups of 16 vectors of 16 bytes are a page, which is readable as the caller promises.
        let load = |at: usize| unsafe { vectors.add(group + at).read_volatile() };
        let any = (1..16).fold(load(0), |any, at| _mm_or_si128(any, load(at)));
        _mm_movemask_epi8(_mm_cmpeq_epi8(any, _mm_setzero_si128())) == 0xffff
    })
}
