//! What can't be reached, and what the error says of it.

use crate::bed::{Bed, RAM, batch};
use crate::victim::{HUGE, Kind};
use ram::{Land, PAGE, PageSets, Process, RamError, Reach, Region, Run, Window};

#[test]
fn memory_that_is_not_mapped_is_named_by_its_offset() {
    let Some(bed) = Bed::new(Kind::Anonymous, 2 * HUGE) else { return };
    bed.store(0, 1024, 1);
    let (source, target) = (bed.source(), bed.target());
    bed.victim.munmap(bed.memory.page(20), 4096);
    let mut window = Window::new(64);
    let error = window.load(&source, &batch(10..40)).unwrap_err();
    let hole = 20 * PAGE as u64;
    assert!(matches!(error, RamError::Access { what: "read", offset, .. } if offset == hole), "{error}");
    window.open(&target, &batch(10..40)).unwrap();
    let error = window.settle(&target, &batch(10..40)).unwrap_err();
    assert!(matches!(error, RamError::Access { what: "write", offset, .. } if offset == hole), "{error}");
    assert!(error.to_string().contains("RAM block ram at offset 0x14000"), "{error}");
}

#[test]
fn a_process_that_ended_is_gone() {
    let Some(bed) = Bed::new(Kind::Anonymous, 2 * HUGE) else { return };
    bed.store(0, 10, 1);
    let ram = bed.source();
    bed.victim.kill();
    let gone = |error: RamError| assert!(matches!(error, RamError::Gone { .. }), "{error}");
    gone(Window::new(64).load(&ram, &batch(0..10)).unwrap_err());
    gone(ram.populated(&mut PageSets::new(ram.layout())).unwrap_err());
    gone(ram.zero(RAM, Run { first: 0, count: 10 }).unwrap_err());
    let regions = [bed.memory.region.clone()];
    gone(Process::source(bed.victim.pid, &bed.memory.layout, &regions).unwrap_err());
}

#[test]
fn regions_that_leave_a_gap_are_refused() {
    let Some(bed) = Bed::new(Kind::Anonymous, 2 * HUGE) else { return };
    let open = |regions: &[Region]| Process::source(bed.victim.pid, &bed.memory.layout, regions).unwrap_err();
    let whole = &bed.memory.region;
    let half = Region { pages: 512, ..whole.clone() };
    let late = Region { first_page: 600, pages: 424, ..whole.clone() };
    for (regions, page) in [(vec![], 0), (vec![half.clone()], 512), (vec![half, late], 512)] {
        let error = open(&regions);
        assert!(matches!(error, RamError::Cover { page: at, .. } if at == page), "{error}");
    }
}

#[test]
fn a_shared_file_that_we_may_not_open_is_refused_with_what_it_takes() {
    let Some(bed) = Bed::new(Kind::Memfd, 2 * HUGE) else { return };
    let error = without(&[capability::SYS_ADMIN, capability::CHECKPOINT_RESTORE], || {
        let regions = [bed.memory.region.clone()];
        Process::source(bed.victim.pid, &bed.memory.layout, &regions).unwrap_err()
    });
    assert!(matches!(error, RamError::Forbidden { .. }), "{error}");
    assert!(error.to_string().contains("CAP_CHECKPOINT_RESTORE"), "{error}");
}

#[test]
fn a_process_that_we_may_not_trace_is_refused_with_what_it_takes() {
    let Some(bed) = Bed::new(Kind::Anonymous, 2 * HUGE) else { return };
    let error = without(&[], || {
        // SAFETY: a system call without pointers, for this thread only: it ends with the closure.
        unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
        let regions = [bed.memory.region.clone()];
        Process::source(bed.victim.pid, &bed.memory.layout, &regions).unwrap_err()
    });
    assert!(matches!(error, RamError::Pagemap { .. }), "{error}");
    assert!(error.to_string().contains("CAP_SYS_PTRACE"), "{error}");
}

/// Runs this on a thread of its own that lacks some capabilities.
fn without<T: Send>(capabilities: &[u32], run: impl FnOnce() -> T + Send) -> T {
    let lacking = capabilities.iter().fold(0u64, |bits, capability| bits | 1 << capability);
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            // struct __user_cap_header_struct of version 3, and two of __user_cap_data_struct.
            let mut header = [0x2008_0522u32, 0];
            let mut sets = [[0u32; 3]; 2];
            // SAFETY: the structures these calls take. They change this thread only.
            unsafe {
                assert_eq!(libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()), 0);
                sets[0][0] &= !(lacking as u32);
                sets[1][0] &= !((lacking >> 32) as u32);
                assert_eq!(libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_mut_ptr()), 0);
            }
            run()
        });
        thread.join().unwrap()
    })
}

mod capability {
    pub const SYS_ADMIN: u32 = 21;
    pub const CHECKPOINT_RESTORE: u32 = 40;
}
