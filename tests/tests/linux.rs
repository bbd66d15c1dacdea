//! The tests of the Linux guest: each workload runs, and sees it when its memory is spoiled. Nothing here needs
//! whimbrel.

use std::collections::HashSet;

use harness::{Accel, Aio, Backend, Cache, DEADLINE, Disk, Guest, Vm, VmSpec, or_skip, wait_until};

#[test]
fn memory_redis_and_discards_are_checked_in_one_guest() {
    let guest = Guest::linux(&["memcheck", "redis", "discardcheck"], "rate=5000");
    or_skip!(VmSpec::new(guest).balloon().boot()).wait_beats(5);
}

#[test]
fn linux_runs_under_kvm() {
    or_skip!(VmSpec::new(Guest::linux(&["memcheck"], "")).accel(Accel::Kvm).boot()).wait_beats(5);
}

#[test]
fn a_spoiled_page_of_any_workload_with_stamped_pages_is_seen() {
    for workload in ["memcheck", "discardcheck"] {
        let vm = or_skip!(VmSpec::new(Guest::linux(&[workload], "dirty=0")).boot());
        vm.wait_ok();
        vm.pause();
        // All of them: some are of blocks that were given back.
        for gpa in find_pages(&vm, |page| page.starts_with(b"Whimbrel")) {
            vm.write_guest(gpa + 1000, &[0x5a; 8]);
        }
        vm.resume();
        assert!(vm.wait_line(&format!("LOST who={workload} ")).ends_with("kind=torn"));
    }
}

/// Looks through guest RAM for pages; gives their addresses.
fn find_pages(vm: &Vm, wanted: impl Fn(&[u8]) -> bool) -> Vec<u64> {
    const MIB: usize = 1 << 20;
    let mut chunk = vec![0; MIB];
    let mut found = Vec::new();
    for start in (MIB..768 * MIB).step_by(MIB) {
        vm.read_guest(start as u64, &mut chunk);
        let pages = chunk.chunks_exact(4096).enumerate().filter(|(_, page)| wanted(page));
        found.extend(pages.map(|(page, _)| (start + page * 4096) as u64));
    }
    found
}

#[test]
fn direct_reads_are_checked_with_every_kind_of_asynchronous_io() {
    for aio in [Aio::Threads, Aio::Native, Aio::IoUring] {
        let disk = or_skip!(Disk::stamped(32)).cache(Cache::None).aio(aio);
        let vm = or_skip!(VmSpec::new(Guest::linux(&["diocheck"], "readers=4")).disk(disk).boot());
        vm.wait_beats(5);
        let beats = vm.transcript().beats();
        assert!(beats.last().is_some_and(|beat| beat.writes > 8), "hardly a read completed: {beats:?}");
    }
}

#[test]
fn a_wrong_block_of_the_disk_is_seen() {
    let disk = or_skip!(Disk::stamped(4));
    let image = std::fs::OpenOptions::new().write(true).open(disk.path()).expect("the image is ours");
    std::os::unix::fs::FileExt::write_all_at(&image, &[0; 512], 5 * 4096 + 512)
        .expect("the image is writable");
    let vm = or_skip!(VmSpec::new(Guest::linux(&["diocheck"], "readers=2")).disk(disk).boot());
    vm.wait_line("LOST who=diocheck page=5 ");
}

#[test]
fn a_buffer_that_changes_long_after_its_read_is_seen() {
    let disk = or_skip!(Disk::stamped(4));
    let guest = Guest::linux(&["diocheck"], "readers=1 buffers=512 chunk_kib=4");
    let vm = or_skip!(VmSpec::new(guest).disk(disk).boot());
    vm.wait_ok();
    // Not of block 0, whose first word is 0.
    let first_words: HashSet<[u8; 8]> = (1..1024).map(|page| Disk::word(page * 512)).collect();
    vm.pause();
    // All of them: the kernel's cache holds one too, from its look for partitions.
    for gpa in find_pages(&vm, |page| first_words.contains(&page[..8])) {
        vm.write_guest(gpa + 8, &[0; 8]);
    }
    vm.resume();
    vm.wait_line("kind=later");
}

/// Without it the test of hidden writers would prove nothing: reads must stay under way in the host's kernel.
#[test]
fn a_slowed_device_holds_direct_reads_back() {
    const BYTES_PER_SECOND: u64 = 4 << 20;
    let disk = or_skip!(Disk::stamped(32)).slow_device(BYTES_PER_SECOND);
    let vm = or_skip!(VmSpec::new(Guest::linux(&["diocheck"], "readers=8 chunk_kib=1024")).disk(disk).boot());
    vm.wait_beats(30);
    let beats = vm.transcript().beats();
    let (first, last) = (&beats[beats.len() - 30], &beats[beats.len() - 1]);
    let bytes_per_second = ((last.writes - first.writes) << 20) / 3;
    assert!(bytes_per_second < 2 * BYTES_PER_SECOND, "{bytes_per_second} bytes a second");
    assert!(last.writes > 0, "no read completed at all");
}

#[test]
fn memory_that_the_guest_frees_leaves_the_host() {
    for backend in [Backend::Default, Backend::Memfd, Backend::File] {
        let guest = Guest::linux(&["discardcheck"], "");
        let vm = or_skip!(VmSpec::new(guest).backend(backend).balloon().boot());
        vm.wait_ok();
        let mut most = 0;
        let shrank = wait_until(DEADLINE, || {
            let resident = vm.resident_bytes();
            most = resident.max(most);
            (resident + (24 << 20) < most).then_some(())
        });
        assert!(shrank.is_some(), "{backend:?}: never less than 24 MiB below {most} bytes");
        vm.wait_ok();
    }
}
