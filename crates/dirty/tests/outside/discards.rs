//! Memory that the VM gives back: what is reported by itself, and what has to be looked for.

use crate::victim::{HUGE, Kind, Victim};
use crate::watch::{RAM, Round, Watch, pages};
use dirty::{Changes, Options, Outside, Tracker};
use ram::{Block, Layout, Process, Region};
use std::sync::Arc;

const FILES: [Kind; 3] = [Kind::Memfd, Kind::SharedAnonymous, Kind::Disk];

fn filled(kind: Kind, options: Options) -> Option<Watch> {
    Watch::with(kind, 4 * HUGE, options, |victim, memory| victim.store(memory.at, memory.bytes, 7))
}

/// Punches through the mapping, as the balloon does where it has no descriptor.
fn remove(watch: &Watch, page: u64, count: u64) {
    watch.madvise(page, count, libc::MADV_REMOVE);
}

/// Punches through the descriptor, if there is one.
fn punch(watch: &Watch, page: u64, count: u64) {
    match watch.memory.fd {
        Some(_) => watch.punch(page, count),
        None => remove(watch, page, count),
    }
}

fn all(watch: &Watch) -> Vec<u64> {
    (0..watch.memory.pages()).collect()
}

#[test]
fn discarded_private_memory_is_gone() {
    for hole_scan in [false, true] {
        for kind in [Kind::Anonymous, Kind::AnonymousHuge] {
            let Some(mut watch) = filled(kind, Options { hole_scan, ..Options::default() }) else { continue };
            watch.madvise(3, 2, libc::MADV_DONTNEED);
            assert_eq!(watch.collect(), Round::gone([3, 4]), "{kind:?}");
            watch.madvise(512, 512, libc::MADV_DONTNEED);
            assert_eq!(watch.collect(), Round::gone(512..1024), "{kind:?}");
            assert_eq!(watch.load(512, 512), 0);
            assert_eq!(watch.collect(), Round::nothing(), "{kind:?}: read again");
            watch.store(600, 1, 8);
            assert_eq!(watch.collect(), Round::data([600]), "{kind:?}: written again");
        }
    }
}

#[test]
fn private_memory_discarded_and_written_in_one_round_is_data() {
    for hole_scan in [false, true] {
        let options = Options { hole_scan, ..Options::default() };
        let Some(mut watch) = filled(Kind::Anonymous, options) else { continue };
        watch.madvise(0, 1024, libc::MADV_DONTNEED);
        watch.store(9, 2, 8);
        let round = watch.collect();
        assert_eq!(round.data, [9, 10]);
        assert_eq!(round.gone.len(), 1022);
    }
}

#[test]
fn a_private_page_of_a_file_that_is_discarded_shows_the_file_again() {
    let fill = Watch::new(Kind::PrivateFile, 2 * HUGE, |victim, memory| {
        let fd = memory.fd.unwrap() as i64;
        let file = victim.mmap(0, memory.bytes, libc::MAP_SHARED, fd, 0).unwrap();
        victim.store(file, 4096 * 8, 5);
        victim.munmap(file, memory.bytes);
        victim.store(memory.page(4), 4096 * 8, 7);
    });
    let Some(mut watch) = fill else { return };
    watch.madvise(0, 1024, libc::MADV_DONTNEED);
    assert_eq!(watch.collect(), Round::data(4..12));
    assert_eq!(watch.read(&(4..12).collect::<Vec<_>>()), [5, 5, 5, 5, 0, 0, 0, 0]);
    // Reading maps the file's pages, which is one more change to what they were known to be.
    assert_eq!(watch.collect(), Round::data(4..12));
    assert_eq!(watch.collect(), Round::nothing());
}

#[test]
fn pages_of_a_file_that_a_private_mapping_only_shows_are_clean() {
    let shown = Watch::new(Kind::PrivateFile, 2 * HUGE, |victim, memory| {
        let fd = memory.fd.unwrap() as i64;
        let file = victim.mmap(0, memory.bytes, libc::MAP_SHARED, fd, 0).unwrap();
        victim.store(file, memory.bytes, 5);
        victim.munmap(file, memory.bytes);
        victim.load(memory.at, memory.bytes);
    });
    let Some(mut watch) = shown else { return };
    assert_eq!(watch.populated().len(), 1024);
    assert_eq!(watch.collect(), Round::nothing());
    watch.store(3, 1, 6);
    assert_eq!(watch.collect(), Round::data([3]));
}

#[test]
fn a_block_of_several_kinds_of_memory_is_tracked_kind_by_kind() {
    if !crate::victim::privileged() {
        return;
    }
    let victim = Victim::start();
    let kinds = [Kind::PrivateFile, Kind::Anonymous, Kind::Memfd];
    let parts: Vec<_> = kinds.iter().map(|&kind| victim.map(kind, HUGE).unwrap()).collect();
    let regions: Vec<_> = (0..).zip(&parts).map(|(at, part)| at_page(&part.region, at * 512)).collect();
    let block = Block { name: "ram".into(), used_bytes: 3 * HUGE, page_bytes: 4096 };
    let layout = Layout::new(vec![block]).unwrap();
    parts.iter().for_each(|part| victim.store(part.at, part.bytes, 7));
    let ram = Arc::new(Process::source(victim.pid, &layout, &regions).unwrap());
    let options = Options { hole_scan: true, ..Options::default() };
    let mut tracker = Outside::new(victim.uffd(), ram, options).unwrap();
    tracker.arm().unwrap();
    for part in &parts {
        victim.store(part.page(3), 4096, 8);
        victim.madvise(part.page(5), 4096, libc::MADV_DONTNEED).unwrap();
    }
    let mut changes = Changes::new(&layout);
    tracker.collect(&mut changes).unwrap();
    assert_eq!(pages(&changes.data[RAM]), [3, 5, 512 + 3, 1024 + 3]);
    assert_eq!(pages(&changes.gone[RAM]), [512 + 5]);
}

fn at_page(region: &Region, first_page: u64) -> Region {
    Region { first_page, ..region.clone() }
}

#[test]
fn discarded_private_huge_pages_are_sent_again() {
    let Some(mut watch) = filled(Kind::PrivateHugetlb, Options::default()) else { return };
    watch.madvise(512, 512, libc::MADV_DONTNEED);
    assert_eq!(watch.collect(), Round::data(512..1024));
    assert_eq!(watch.read(&[511, 512, 1023]), [7, 0, 0]);
    assert_eq!(watch.collect(), Round::nothing());
}

#[test]
fn pages_freed_lazily_are_reported_once_they_are_really_gone() {
    let Some(mut watch) = filled(Kind::Anonymous, Options::default()) else { return };
    watch.madvise(0, 64, libc::MADV_FREE);
    assert_eq!(watch.collect(), Round::nothing());
    watch.madvise(0, 64, libc::MADV_PAGEOUT);
    let round = watch.collect();
    let zero: Vec<u64> = (0..64).filter(|&page| watch.load(page, 1) == 0).collect();
    assert!(!zero.is_empty(), "the kernel took none of them");
    assert!(zero.iter().all(|page| round.gone.contains(page) || round.data.contains(page)), "{round:?}");
}

#[test]
fn dropping_a_mapping_of_shared_memory_loses_nothing() {
    for kind in [Kind::Memfd, Kind::SharedAnonymous, Kind::TmpfsHuge, Kind::Hugetlb, Kind::Disk] {
        let Some(mut watch) = filled(kind, Options::default()) else { continue };
        watch.store(3, 1, 8);
        watch.madvise(0, 512, libc::MADV_DONTNEED);
        let round = watch.collect();
        assert!(round.data.contains(&3), "{kind:?}: {round:?}");
        assert_eq!(round.gone, [0; 0], "{kind:?}");
        assert_eq!(watch.read(&[2, 3]), [7, 8], "{kind:?}");
        assert_eq!(watch.collect(), Round::nothing(), "{kind:?}");
        watch.store(3, 1, 9);
        assert!(watch.collect().data.contains(&3), "{kind:?}");
    }
}

#[test]
fn holes_punched_into_clean_pages_are_found_by_reconciling() {
    for kind in FILES {
        for discard in [remove, punch] {
            let Some(mut watch) = filled(kind, Options::default()) else { continue };
            let sent = all(&watch);
            watch.read(&sent);
            discard(&watch, 3, 2);
            discard(&watch, 512, 512);
            assert_eq!(watch.collect(), Round::nothing(), "{kind:?}: the kernel does not tell");
            let wanted = Round::gone([3, 4].into_iter().chain(512..1024));
            assert_eq!(watch.reconcile(&sent), wanted, "{kind:?}");
        }
    }
}

#[test]
fn holes_punched_into_huge_pages_are_found() {
    for kind in [Kind::TmpfsHuge, Kind::Hugetlb] {
        let Some(mut watch) = filled(kind, Options::default()) else { continue };
        let sent = all(&watch);
        watch.read(&sent);
        watch.punch(512, 512);
        let (told, found) = (watch.collect(), watch.reconcile(&sent));
        let wanted: Vec<u64> = (512..1024).collect();
        assert_eq!(found.gone, wanted, "{kind:?}");
        assert_eq!(found.data, [0; 0], "{kind:?}");
        assert!(told.gone.is_empty() || told.gone == wanted, "{kind:?}");
    }
}

#[test]
fn a_few_small_pages_punched_out_of_a_huge_one_are_found() {
    let Some(mut watch) = filled(Kind::TmpfsHuge, Options::default()) else { return };
    let sent = all(&watch);
    watch.read(&sent);
    watch.punch(515, 3);
    watch.collect();
    assert_eq!(watch.reconcile(&sent).gone, [515, 516, 517]);
}

#[test]
fn a_page_that_was_punched_and_read_again_is_sent_again() {
    for kind in [Kind::Memfd, Kind::SharedAnonymous, Kind::Disk, Kind::Hugetlb] {
        let Some(mut watch) = filled(kind, Options::default()) else { continue };
        let sent = all(&watch);
        watch.read(&sent);
        let (first, count) = if kind == Kind::Hugetlb { (512, 512) } else { (700, 3) };
        remove(&watch, first, count);
        assert_eq!(watch.load(first, count), 0);
        watch.collect();
        // Our reading its neighbours must not bring the page back.
        let neighbours: Vec<u64> = (512..700).chain(703..1024).collect();
        if kind != Kind::Hugetlb {
            watch.read(&neighbours);
        }
        let round = watch.reconcile(&sent);
        match kind {
            // The disk file has a hole there still: reading it allocates a page of cache, and nothing on disk.
            Kind::Disk => assert_eq!(round, Round::gone(first..first + count)),
            _ => assert_eq!(round, Round::data(first..first + count), "{kind:?}"),
        }
        assert_eq!(watch.read(&[first]), [0], "{kind:?}");
    }
}

#[test]
fn a_page_that_was_sent_again_after_a_discard_is_not_sent_for_ever() {
    let Some(mut watch) = filled(Kind::Memfd, Options::default()) else { return };
    let sent = all(&watch);
    watch.read(&sent);
    remove(&watch, 700, 3);
    watch.load(700, 3);
    let round = watch.reconcile(&sent);
    watch.read(&round.data);
    remove(&watch, 0, 1);
    assert_eq!(watch.reconcile(&sent), Round::gone([0]));
}

#[test]
fn a_page_that_was_written_before_it_was_punched_is_gone_without_reconciling() {
    for kind in FILES {
        let Some(mut watch) = filled(kind, Options::default()) else { continue };
        watch.store(3, 4, 0);
        remove(&watch, 3, 4);
        let round = watch.collect();
        assert_eq!((round.data.len(), round.gone), (0, vec![3, 4, 5, 6]), "{kind:?}");
    }
}

#[test]
fn a_file_cut_short_and_grown_again_has_holes() {
    let Some(mut watch) = filled(Kind::Memfd, Options::default()) else { return };
    let sent = all(&watch);
    watch.read(&sent);
    let fd = watch.memory.fd.unwrap();
    watch.victim.call(libc::SYS_ftruncate, &[fd, HUGE]).unwrap();
    watch.victim.call(libc::SYS_ftruncate, &[fd, watch.memory.bytes]).unwrap();
    assert_eq!(watch.reconcile(&sent), Round::gone(512..2048));
}

#[test]
fn a_written_page_that_is_a_hole_by_the_final_stop_is_gone_and_not_read() {
    let Some(mut watch) = filled(Kind::Memfd, Options::default()) else { return };
    watch.store(3, 1, 8);
    assert_eq!(watch.collect(), Round::data([3]));
    remove(&watch, 3, 1);
    // Reported as written, not sent yet, and a hole by now.
    let mut changes = Changes::new(&watch.memory.layout);
    changes.insert_data(RAM, ram::Run { first: 3, count: 1 });
    let sent = ram::PageSets::new(&watch.memory.layout);
    watch.tracker.reconcile(&sent, &mut changes).unwrap();
    assert!(changes.data.is_empty() && changes.gone.len() == 1);
}

#[test]
fn reconciling_looks_at_nothing_while_a_named_file_had_nothing_discarded() {
    for kind in [Kind::TmpfsHuge, Kind::Disk] {
        let Some(mut watch) = filled(kind, Options::default()) else { continue };
        let sent = all(&watch);
        watch.read(&sent);
        watch.store(0, 2048, 9);
        watch.collect();
        assert_eq!(watch.reconcile(&sent), Round::nothing(), "{kind:?}");
        assert_eq!(watch.tracker.stats().reconciled_regions, 0, "{kind:?}");
        remove(&watch, 512, 512);
        assert_eq!(watch.reconcile(&sent).gone.len(), 512, "{kind:?}");
        assert_eq!(watch.tracker.stats().reconciled_regions, 1, "{kind:?}");
        assert_eq!(watch.tracker.stats().discarded_pages, 512, "{kind:?}");
    }
}

#[test]
fn a_private_page_of_a_file_that_is_discarded_and_read_again_is_sent_again() {
    let Some(mut watch) = filled(Kind::PrivateFile, Options::default()) else { return };
    watch.madvise(512, 512, libc::MADV_DONTNEED);
    assert_eq!(watch.load(512, 512), 0);
    assert_eq!(watch.collect(), Round::data(512..1024));
    assert_eq!(watch.collect(), Round::nothing());
    watch.store(600, 1, 8);
    assert_eq!(watch.collect(), Round::data([600]));
}

#[test]
fn a_huge_page_written_and_unmapped_in_one_round_is_reported_once() {
    let Some(mut watch) = Watch::new(Kind::Hugetlb, 4 * HUGE, |_, _| {}) else { return };
    watch.store(512, 1, 8);
    watch.madvise(512, 512, libc::MADV_DONTNEED);
    watch.store(1024, 1, 8);
    watch.punch(1024, 512);
    let wanted = Round { data: (512..1024).collect(), gone: (1024..1536).collect() };
    assert_eq!(watch.collect(), wanted);
    assert_eq!(watch.collect(), Round::nothing());
    watch.store(1024, 1, 9);
    assert_eq!(watch.collect(), Round::data(1024..1536));
}
