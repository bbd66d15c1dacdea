//! What a page may be in when it is protected, and what is reported of it.

use crate::victim::{HUGE, Kind, Memory, Swap, Victim};
use crate::watch::{Round, Turn, Watch};
use dirty::{Kvm, Options};
use std::time::Duration;

const SMALL: [Kind; 5] = [Kind::Anonymous, Kind::Memfd, Kind::SharedAnonymous, Kind::Disk, Kind::PrivateFile];

#[test]
fn untouched_memory_holds_nothing_and_reports_nothing() {
    for kind in Kind::ALL {
        let Some(mut watch) = Watch::new(kind, 2 * HUGE, |_, _| {}) else { continue };
        assert_eq!(watch.populated(), [0; 0], "{kind:?}");
        assert_eq!(watch.collect(), Round::nothing(), "{kind:?}");
    }
}

#[test]
fn written_pages_are_populated_and_clean_once_armed() {
    for kind in SMALL {
        let written = Watch::new(kind, 2 * HUGE, |victim, memory| victim.store(memory.page(3), 4096 * 5, 7));
        let Some(mut watch) = written else { continue };
        assert_eq!(watch.populated(), [3, 4, 5, 6, 7], "{kind:?}");
        assert_eq!(watch.collect(), Round::nothing(), "{kind:?}");
        assert_eq!(watch.read(&[3, 7]), [7, 7], "{kind:?}");
    }
}

#[test]
fn a_written_page_is_reported_once_and_its_neighbours_are_not() {
    for kind in SMALL {
        let written = Watch::new(kind, 2 * HUGE, |victim, memory| victim.store(memory.page(0), HUGE, 7));
        let Some(mut watch) = written else { continue };
        watch.store(20, 1, 8);
        watch.store(22, 2, 8);
        assert_eq!(watch.collect(), Round::data([20, 22, 23]), "{kind:?}");
        assert_eq!(watch.collect(), Round::nothing(), "{kind:?}");
        // The page still reads what it read before; the kernel tells writes, not differences.
        watch.store(22, 1, 8);
        assert_eq!(watch.collect(), Round::data([22]), "{kind:?}");
    }
}

#[test]
fn an_untouched_page_that_is_written_is_reported() {
    for kind in SMALL {
        let Some(mut watch) = Watch::new(kind, 2 * HUGE, |_, _| {}) else { continue };
        watch.store(600, 2, 8);
        assert_eq!(watch.collect(), Round::data([600, 601]), "{kind:?}");
        assert_eq!(watch.read(&[600]), [8], "{kind:?}");
        watch.store(600, 1, 9);
        assert_eq!(watch.collect(), Round::data([600]), "{kind:?}");
    }
}

#[test]
fn reading_holes_reports_nothing() {
    for kind in [Kind::Anonymous, Kind::AnonymousHuge, Kind::Memfd, Kind::SharedAnonymous, Kind::Disk] {
        let read = Watch::new(kind, 2 * HUGE, |victim, memory| {
            victim.load(memory.page(3), 4096 * 5);
        });
        let Some(mut watch) = read else { continue };
        assert_eq!(watch.load(500, 100), 0);
        assert_eq!(watch.collect(), Round::nothing(), "{kind:?}");
    }
}

#[test]
fn the_shared_zero_page_is_not_data_and_is_reported_once_written() {
    for kind in [Kind::Anonymous, Kind::AnonymousHuge] {
        let read = Watch::new(kind, 2 * HUGE, |victim, memory| {
            victim.load(memory.page(0), HUGE);
        });
        let Some(mut watch) = read else { continue };
        assert_eq!(watch.populated(), [0; 0], "{kind:?}");
        watch.store(5, 1, 8);
        assert_eq!(watch.collect(), Round::data([5]), "{kind:?}");
    }
}

#[test]
fn a_huge_page_stays_whole_when_armed_and_reports_single_pages_of_private_memory() {
    let fill = Watch::new(Kind::AnonymousHuge, 2 * HUGE, |victim, memory| {
        victim.store(memory.page(0), memory.bytes, 7);
    });
    let Some(mut watch) = fill else { return };
    assert_eq!(watch.populated().len(), 1024);
    watch.load(0, 1024);
    assert_eq!(watch.collect(), Round::nothing());
    watch.store(513, 1, 8);
    assert_eq!(watch.collect(), Round::data([513]));
    watch.store(514, 1, 8);
    assert_eq!(watch.collect(), Round::data([514]));
}

#[test]
fn a_huge_page_of_a_tmpfs_is_reported_whole() {
    let fill = Watch::new(Kind::TmpfsHuge, 2 * HUGE, |victim, memory| {
        victim.store(memory.page(0), memory.bytes, 7);
    });
    let Some(mut watch) = fill else { return };
    watch.store(513, 1, 8);
    assert_eq!(watch.collect(), Round::data(512..1024));
    assert_eq!(watch.collect(), Round::nothing());
}

#[test]
fn hugetlb_is_reported_in_its_own_pages() {
    for kind in [Kind::Hugetlb, Kind::PrivateHugetlb] {
        let fill = Watch::new(kind, 4 * HUGE, |victim, memory| victim.store(memory.page(0), 4096, 7));
        let Some(mut watch) = fill else { continue };
        assert_eq!(watch.populated(), (0..512).collect::<Vec<_>>(), "{kind:?}");
        watch.store(3, 1, 8);
        assert_eq!(watch.collect(), Round::data(0..512), "{kind:?}");
        watch.store(512, 1, 8);
        assert_eq!(watch.collect(), Round::data(512..1024), "{kind:?}");
        assert_eq!(watch.read(&[3, 512]), [8, 8], "{kind:?}");
        assert_eq!(watch.collect(), Round::nothing(), "{kind:?}");
    }
}

#[test]
fn an_untouched_huge_page_of_shared_hugetlb_that_is_read_is_clean() {
    let Some(mut watch) = Watch::new(Kind::Hugetlb, 4 * HUGE, |_, _| {}) else { return };
    watch.load(0, 1);
    assert_eq!(watch.collect(), Round::nothing());
}

#[test]
fn data_that_only_the_file_has_is_populated() {
    for kind in [Kind::Memfd, Kind::Disk, Kind::PrivateFile, Kind::Hugetlb] {
        let written = Watch::new(kind, 2 * HUGE, |victim, memory| {
            victim.store(memory.page(0), 4096, 7);
            let fd = memory.fd.unwrap();
            // hugetlbfs takes no write(2): data gets there through another mapping.
            let other = victim.mmap(0, memory.bytes, libc::MAP_SHARED, fd as i64, 0).unwrap();
            victim.store(other + HUGE, 4096, 9);
            victim.munmap(other, memory.bytes);
        });
        let Some(mut watch) = written else { continue };
        let populated = watch.populated();
        assert!(populated.contains(&0) && populated.contains(&512), "{kind:?}: {populated:?}");
        assert_eq!(watch.read(&[0, 512]), [7, 9], "{kind:?}");
    }
}

#[test]
fn clearing_in_two_phases_finds_what_clearing_whole_finds() {
    let kvm = |refault: Duration| Options { kvm: Some(Kvm { vcpus: 2, refault }), ..Options::default() };
    // Free refaults join all extents into one, dear ones none.
    for options in [kvm(Duration::ZERO), kvm(Duration::from_secs(1)), kvm(Duration::from_micros(2))] {
        for kind in Kind::ALL {
            let fill = Watch::with(kind, 4 * HUGE, options, |victim, memory| {
                victim.store(memory.page(0), HUGE, 7);
            });
            let Some(mut watch) = fill else { continue };
            (0..512).step_by(3).for_each(|page| watch.store(page, 1, 8));
            watch.store(1030, 20, 8);
            let found = watch.collect();
            let wanted = (0..512).step_by(3).chain(1030..1050).collect::<Vec<_>>();
            match kind {
                Kind::Hugetlb | Kind::PrivateHugetlb => {
                    assert_eq!(found, Round::data((0..512).chain(1024..1536)), "{kind:?}");
                }
                Kind::TmpfsHuge => assert!(wanted.iter().all(|page| found.data.contains(page)), "{kind:?}"),
                _ => assert_eq!(found, Round::data(wanted), "{kind:?}"),
            }
            assert_eq!(watch.collect(), Round::nothing(), "{kind:?}");
        }
    }
}

#[test]
fn swapping_out_hides_no_page() {
    let Some(_swap) = Swap::on() else { return };
    for kind in [Kind::Anonymous, Kind::Memfd, Kind::PrivateFile] {
        let swapped = Watch::new(kind, 2 * HUGE, |victim, memory| {
            victim.store(memory.page(0), 4096 * 64, 7);
            victim.madvise(memory.page(0), 4096 * 64, libc::MADV_PAGEOUT).unwrap();
        });
        let Some(mut watch) = swapped else { continue };
        assert_eq!(watch.populated(), (0..64).collect::<Vec<_>>(), "{kind:?}: swapped out before arming");
        watch.store(10, 2, 8);
        watch.store(100, 1, 8);
        watch.madvise(0, 128, libc::MADV_PAGEOUT);
        let round = watch.collect();
        match kind {
            // Here a clean page that is swapped out could be one that was discarded, and is sent again.
            Kind::PrivateFile => assert_eq!(round, Round::data((0..64).chain([100]))),
            _ => assert_eq!(round, Round::data([10, 11, 100]), "{kind:?}: swapped out once written"),
        }
        assert_eq!(watch.read(&round.data).iter().filter(|&&word| word == 8).count(), 3, "{kind:?}");
        watch.load(0, 128);
        watch.madvise(0, 128, libc::MADV_PAGEOUT);
        watch.load(0, 128);
        assert_eq!(watch.collect(), Round::nothing(), "{kind:?}: swapped in and out and in, only read");
    }
}

#[test]
fn compacting_memory_keeps_what_was_written_and_what_was_not() {
    let fill = |victim: &Victim, memory: &Memory| victim.store(memory.at, memory.bytes, 7);
    let filled = Watch::in_turn(Turn::alone(), Kind::Anonymous, 8 * HUGE, Options::default(), fill);
    let Some(mut watch) = filled else { return };
    watch.store(40, 3, 8);
    std::fs::write("/proc/sys/vm/compact_memory", "1").unwrap();
    assert_eq!(watch.collect(), Round::data([40, 41, 42]));
}
