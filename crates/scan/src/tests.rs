//! Every kernel that this CPU has says what the scalar one says, and looks at the page and nothing around it.

use super::*;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect};
use proptest::prelude::*;
use std::num::NonZeroUsize;

/// A page of our own on a page boundary.
#[repr(align(4096))]
#[derive(Clone)]
struct Page([u8; PAGE]);

impl Page {
    const ZERO: Page = Page([0; PAGE]);

    fn check(&self, kernel: Kernel) -> bool {
        kernel.is_zero(Span::from(&self.0[..]))
    }
}

#[test]
fn scalar_finds_a_single_bit_wherever_it_is() {
    assert!(Page::ZERO.check(scalar::KERNEL));
    // Miri is slow: there, the ends and a prime step in between.
    let step = if cfg!(miri) { 509 } else { 1 };
    for at in (0..PAGE).step_by(step).chain([PAGE - 1]) {
        let mut page = Page::ZERO;
        page.0[at] = 1 << (at % 8);
        assert!(!page.check(scalar::KERNEL), "byte {at}");
    }
}

#[test]
fn every_kernel_finds_a_single_byte_wherever_it_is() {
    for kernel in Kernel::all() {
        assert!(Page::ZERO.check(kernel), "{}", kernel.name);
        for at in 0..PAGE {
            let mut page = Page::ZERO;
            page.0[at] = 1 << (at % 8);
            assert!(!page.check(kernel), "{}, byte {at}", kernel.name);
            // Not the samples' doing alone.
            // SAFETY: a page of our own, and the kernel runs here.
            assert!(!unsafe { (kernel.check)(page.0.as_ptr()) }, "{}, byte {at}", kernel.name);
        }
    }
}

proptest! {
    #[test]
    fn every_kernel_agrees_with_the_one_to_be_believed(bytes in prop::collection::vec((0..PAGE, any::<u8>()), 0..4)) {
        let mut page = Page::ZERO;
        bytes.into_iter().for_each(|(at, byte)| page.0[at] = byte);
        let wanted = page.check(scalar::KERNEL);
        prop_assert_eq!(wanted, page.0 == [0; PAGE]);
        for kernel in Kernel::all() {
            prop_assert_eq!(page.check(kernel), wanted, "{}", kernel.name);
        }
    }
}

#[test]
fn no_kernel_touches_what_is_before_or_after_the_page() {
    let length = NonZeroUsize::new(3 * PAGE).unwrap();
    // SAFETY: a new mapping at a place of the kernel's choice; its outer pages are made unreadable.
    let page = unsafe {
        let all = mmap_anonymous(None, length, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE).unwrap();
        mprotect(all, PAGE, ProtFlags::PROT_NONE).unwrap();
        mprotect(all.byte_add(2 * PAGE), PAGE, ProtFlags::PROT_NONE).unwrap();
        Span::new(all.byte_add(PAGE).cast(), PAGE)
    };
    for kernel in Kernel::all() {
        assert!(kernel.is_zero(page), "{}", kernel.name);
    }
}

#[test]
fn the_best_kernel_comes_first_and_the_slow_one_is_always_there() {
    let names: Vec<&str> = Kernel::all().map(|kernel| kernel.name).collect();
    assert_eq!(names.first(), Some(&Kernel::best().name));
    assert_eq!(names.last(), Some(&"scalar"));
}

#[test]
#[should_panic(expected = "4095 bytes")]
fn part_of_a_page_is_a_broken_promise() {
    Kernel::best().is_zero(Span::from(&Page::ZERO.0[1..]));
}
