//! What becomes of tracking when the VM's process changes its mappings: it goes on, or the error names the block.

use crate::victim::{HUGE, Kind};
use crate::watch::{Round, Watch};
use dirty::{DirtyError, Options, Outside};
use ram::PAGE;

const KINDS: [Kind; 4] = [Kind::Anonymous, Kind::Memfd, Kind::Hugetlb, Kind::Disk];

fn filled(kind: Kind) -> Option<Watch> {
    Watch::new(kind, 4 * HUGE, |victim, memory| victim.store(memory.at, memory.bytes, 7))
}

#[test]
fn unmapped_memory_is_an_error_that_names_the_block() {
    for kind in KINDS {
        let Some(mut watch) = filled(kind) else { continue };
        watch.victim.munmap(watch.memory.at + HUGE, HUGE);
        let error = watch.try_collect().unwrap_err();
        let hole = watch.memory.at + HUGE;
        assert!(matches!(error, DirtyError::Unmapped { host, .. } if host == hole), "{kind:?}: {error}");
        assert!(error.to_string().contains("RAM block ram"), "{error}");
    }
}

#[test]
fn memory_that_moved_is_an_error() {
    for kind in [Kind::Anonymous, Kind::Memfd] {
        let Some(mut watch) = filled(kind) else { continue };
        let elsewhere =
            watch.victim.mmap(0, 4 * HUGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0).unwrap();
        let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        let bytes = watch.memory.bytes;
        watch.victim.call(libc::SYS_mremap, &[watch.memory.at, bytes, bytes, flags, elsewhere]).unwrap();
        let error = watch.try_collect().unwrap_err();
        assert!(matches!(error, DirtyError::Unmapped { .. }), "{kind:?}: {error}");
    }
}

#[test]
fn other_memory_in_its_place_is_an_error() {
    for kind in KINDS {
        let Some(mut watch) = filled(kind) else { continue };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        watch.victim.mmap(watch.memory.at + HUGE, HUGE, flags, -1, 0).unwrap();
        let error = watch.try_collect().unwrap_err();
        match kind {
            // It looks the same, but nobody watches it.
            Kind::Anonymous => assert!(matches!(error, DirtyError::Unwatched { .. }), "{error}"),
            _ => assert!(matches!(error, DirtyError::Remapped { .. }), "{kind:?}: {error}"),
        }
    }
}

#[test]
fn a_second_mapping_that_can_be_written_is_an_error() {
    let Some(mut watch) = filled(Kind::Memfd) else { return };
    let fd = watch.memory.fd.unwrap() as i64;
    let second = watch.victim.mmap(0, HUGE, libc::MAP_SHARED, fd, HUGE).unwrap();
    let error = watch.try_collect().unwrap_err();
    assert!(matches!(error, DirtyError::Twice { host, .. } if host == second), "{error}");
    watch.victim.munmap(second, HUGE);
    assert_eq!(watch.collect(), Round::nothing());
}

#[test]
fn memory_that_is_no_longer_watched_is_an_error_though_nothing_was_written_there() {
    let Some(mut watch) = filled(Kind::Anonymous) else { return };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    watch.victim.mmap(watch.memory.page(700), 4096, flags, -1, 0).unwrap();
    watch.store(3, 1, 8);
    let error = watch.try_collect().unwrap_err();
    assert!(matches!(error, DirtyError::Unwatched { .. }), "{error}");
}

#[test]
fn protection_that_comes_and_goes_keeps_what_was_written() {
    for kind in [Kind::Anonymous, Kind::AnonymousHuge, Kind::Memfd, Kind::Hugetlb, Kind::PrivateFile] {
        let Some(mut watch) = filled(kind) else { continue };
        let step = if kind == Kind::Hugetlb { 512 } else { 1 };
        watch.store(512, step, 8);
        read_only_and_back(&watch);
        assert_eq!(watch.collect(), Round::data(512..512 + step), "{kind:?}");
        read_only_and_back(&watch);
        assert_eq!(watch.collect(), Round::nothing(), "{kind:?}");
        watch.store(512, step, 8);
        assert_eq!(watch.collect(), Round::data(512..512 + step), "{kind:?}");
    }
}

fn read_only_and_back(watch: &Watch) {
    for rights in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
        let arguments = [watch.memory.at, watch.memory.bytes, rights as u64];
        watch.victim.call(libc::SYS_mprotect, &arguments).unwrap();
    }
}

#[test]
fn a_fork_changes_nothing_for_the_parent() {
    for kind in [Kind::Anonymous, Kind::Memfd, Kind::PrivateFile] {
        let Some(mut watch) = filled(kind) else { continue };
        watch.store(3, 1, 8);
        let child = watch.victim.fork();
        watch.store(5, 1, 8);
        let round = watch.collect();
        assert!(round.data.contains(&3) && round.data.contains(&5), "{kind:?}: {round:?}");
        watch.store(9, 1, 8);
        assert_eq!(watch.collect(), Round::data([9]), "{kind:?}");
        watch.victim.call(libc::SYS_kill, &[child, libc::SIGKILL as u64]).unwrap();
    }
}

#[test]
fn collapsing_into_huge_pages_keeps_what_was_written() {
    for kind in [Kind::Anonymous, Kind::Memfd, Kind::TmpfsHuge] {
        let Some(mut watch) = filled(kind) else { continue };
        watch.store(3, 1, 8);
        watch.victim.madvise(watch.memory.at, HUGE, libc::MADV_COLLAPSE).ok();
        let round = watch.collect();
        assert!(round.data.contains(&3), "{kind:?}: {round:?}");
        assert_eq!(round.gone, [0; 0], "{kind:?}");
        watch.victim.madvise(watch.memory.at, HUGE, libc::MADV_COLLAPSE).ok();
        watch.store(9, 1, 8);
        assert!(watch.collect().data.contains(&9), "{kind:?}");
        assert_eq!(watch.read(&[2, 3, 9]), [7, 8, 8], "{kind:?}");
    }
}

#[test]
fn memory_that_grows_in_place_is_still_watched_where_it_was() {
    let Some(mut watch) = filled(Kind::Anonymous) else { return };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    watch.victim.mmap(watch.memory.at + watch.memory.bytes, PAGE as u64, flags, -1, 0).unwrap();
    watch.store(3, 1, 8);
    assert_eq!(watch.collect(), Round::data([3]));
}

#[test]
fn memory_that_another_userfaultfd_watches_is_refused() {
    let Some(watch) = filled(Kind::Memfd) else { return };
    let second = Outside::new(watch.victim.uffd(), watch.ram.clone(), Options::default());
    let error = second.expect_err("it is registered already");
    let DirtyError::Kernel { call, source, .. } = &error else { panic!("{error}") };
    assert_eq!((*call, source.raw_os_error()), ("UFFDIO_REGISTER", Some(libc::EBUSY)));
}
