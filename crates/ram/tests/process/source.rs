//! Reading the RAM of another process, and telling which of it holds data.

use crate::bed::{Bed, RAM, batch, populated, read};
use crate::victim::{HUGE, Kind, Swap};
use ram::{Backing, Block, BlockId, Layout, Process, Reach, Region, Run};

#[test]
fn pages_are_read_in_the_order_of_the_batch() {
    for kind in Kind::ALL {
        let Some(bed) = Bed::new(kind, 8 * HUGE) else { continue };
        (0..bed.memory.pages()).for_each(|page| bed.store(page, 1, page + 1));
        let ram = bed.source();
        // More pieces than one call takes, and neighbours among them.
        let wanted = batch((0..2048).step_by(3).chain(2050..2100).chain([4095]));
        let words: Vec<u64> = wanted.pages.iter().map(|page| page + 1).collect();
        assert_eq!(read(&ram, &wanted), words, "{kind:?}");
    }
}

#[test]
fn a_page_that_changes_is_read_as_it_is_now() {
    for kind in Kind::ALL {
        let Some(bed) = Bed::new(kind, 2 * HUGE) else { continue };
        bed.store(0, 4, 1);
        let ram = bed.source();
        assert_eq!(read(&ram, &batch(0..4)), [1; 4], "{kind:?}");
        bed.store(1, 2, 2);
        bed.store(600, 1, 3);
        assert_eq!(read(&ram, &batch([0, 1, 2, 3, 600])), [1, 2, 2, 1, 3], "{kind:?}");
    }
}

#[test]
fn only_shared_memory_is_mapped() {
    for kind in Kind::ALL {
        let Some(bed) = Bed::new(kind, 2 * HUGE) else { continue };
        assert_eq!(bed.source().is_mapped(RAM), kind.is_shared(), "{kind:?}");
        assert_eq!(bed.target().is_mapped(RAM), kind.is_shared(), "{kind:?}");
    }
}

#[test]
fn what_was_written_is_populated_and_nothing_else() {
    for kind in [Kind::Anonymous, Kind::Memfd, Kind::SharedAnonymous, Kind::Disk, Kind::PrivateFile] {
        let Some(bed) = Bed::new(kind, 2 * HUGE) else { continue };
        let ram = bed.source();
        assert_eq!(populated(&ram), [0; 0], "{kind:?}");
        bed.store(3, 2, 1);
        bed.store(1000, 24, 1);
        assert_eq!(populated(&ram), [3, 4].into_iter().chain(1000..1024).collect::<Vec<_>>(), "{kind:?}");
    }
}

#[test]
fn huge_pages_are_populated_whole() {
    for kind in [Kind::AnonymousHuge, Kind::TmpfsHuge, Kind::Hugetlb, Kind::PrivateHugetlb] {
        let Some(bed) = Bed::new(kind, 4 * HUGE) else { continue };
        bed.store(513, 1, 1);
        let found = populated(&bed.source());
        assert!(found.contains(&513), "{kind:?}");
        assert!(found.iter().all(|page| (512..1024).contains(page)), "{kind:?}: {found:?}");
    }
}

#[test]
fn the_zero_page_is_not_populated() {
    let Some(bed) = Bed::new(Kind::Anonymous, 2 * HUGE) else { return };
    bed.words(0..1024);
    assert_eq!(populated(&bed.source()), [0; 0]);
}

#[test]
fn asking_and_reading_leaves_holes_as_they_are() {
    for kind in [Kind::Memfd, Kind::SharedAnonymous, Kind::Disk, Kind::TmpfsHuge, Kind::Hugetlb] {
        let Some(bed) = Bed::new(kind, 4 * HUGE) else { continue };
        bed.store(3, 5, 1);
        bed.store(1100, 1, 1);
        let ram = bed.source();
        let before = populated(&ram);
        read(&ram, &batch(before.clone()));
        assert_eq!(populated(&ram), before, "{kind:?}");
    }
}

#[test]
fn memory_in_many_small_pieces_is_told_exactly() {
    for kind in [Kind::Memfd, Kind::SharedAnonymous] {
        let bytes = 80 << 20;
        let Some(bed) = Bed::new(kind, bytes) else { continue };
        let odd: Vec<u64> = (0..bytes / 4096).filter(|page| page % 2 == 1).collect();
        odd.iter().for_each(|&page| bed.store(page, 1, page));
        let ram = bed.source();
        assert_eq!(populated(&ram), odd, "{kind:?}");
        let some = batch(odd.iter().copied().take(2000));
        assert_eq!(read(&ram, &some), some.pages, "{kind:?}");
        assert_eq!(populated(&ram), odd, "{kind:?}: once read");
    }
}

#[test]
fn memory_in_many_small_pieces_is_told_exactly_though_it_is_swapped_out() {
    let Some(_swap) = Swap::on() else { return };
    let Some(bed) = Bed::new(Kind::Memfd, 8 * HUGE) else { return };
    let odd: Vec<u64> = (0..bed.memory.pages()).filter(|page| page % 2 == 1).collect();
    odd.iter().for_each(|&page| bed.store(page, 1, page));
    bed.victim.madvise(bed.memory.at, bed.memory.bytes, libc::MADV_PAGEOUT).unwrap();
    assert_eq!(populated(&bed.source()), odd);
}

#[test]
fn what_is_stored_in_the_file_is_told_for_a_part_of_it() {
    let Some(bed) = Bed::new(Kind::Memfd, 2 * HUGE) else { return };
    bed.store(10, 10, 1);
    let (ram, mut found) = (bed.source(), Vec::new());
    ram.stored(RAM, Run { first: 15, count: 20 }, |run| found.push(run)).unwrap();
    assert_eq!(found, [Run { first: 15, count: 5 }]);
}

#[test]
fn a_block_of_several_regions_is_one() {
    let Some(first) = Bed::new(Kind::Memfd, 2 * HUGE) else { return };
    let second = first.victim.map(Kind::Anonymous, HUGE).unwrap();
    let third = first.victim.map(Kind::SharedAnonymous, HUGE).unwrap();
    let place = |region: &Region, first_page| Region { first_page, ..region.clone() };
    let regions = [place(&third.region, 1536), place(&first.memory.region, 0), place(&second.region, 1024)];
    let block = Block { name: "ram".into(), used_bytes: 4 * HUGE, page_bytes: 4096 };
    let layout = Layout::new(vec![block]).unwrap();
    let ram = Process::source(first.victim.pid, &layout, &regions).unwrap();
    for (memory, word) in [(&first.memory, 1), (&second, 2), (&third, 3)] {
        first.victim.store(memory.at, memory.bytes, word);
    }
    assert_eq!(read(&ram, &batch([1022, 1023, 1024, 1025, 1535, 1536])), [1, 1, 2, 2, 2, 3]);
    assert_eq!(populated(&ram), (0..2048).collect::<Vec<_>>());
    assert!(!ram.is_mapped(RAM));
    assert!(matches!(regions[2].backing, Backing::Anonymous));
}

#[test]
fn what_is_dropped_from_a_file_is_no_longer_mapped_by_us() {
    for kind in [Kind::Memfd, Kind::TmpfsHuge, Kind::Hugetlb, Kind::Disk] {
        let Some(bed) = Bed::new(kind, 4 * HUGE) else { continue };
        bed.store(0, 2048, 1);
        let ram = bed.source();
        read(&ram, &batch(0..2048));
        let all = Run { first: 0, count: 2048 };
        let dropped = |ram: &Process| {
            let mut found = Vec::new();
            ram.dropped(RAM, all, |run| found.extend(run.first..run.end())).unwrap();
            found
        };
        assert_eq!(dropped(&ram), [0; 0], "{kind:?}");
        bed.victim.punch(bed.memory.fd.unwrap(), HUGE, HUGE).unwrap();
        bed.words(512..1024);
        assert_eq!(dropped(&ram), (512..1024).collect::<Vec<_>>(), "{kind:?}");
    }
}

#[test]
fn two_blocks_are_told_apart() {
    let Some(bed) = Bed::new(Kind::Memfd, HUGE) else { return };
    let other = bed.victim.map(Kind::Anonymous, HUGE).unwrap();
    let block = |name: &str| Block { name: name.into(), used_bytes: HUGE, page_bytes: 4096 };
    let layout = Layout::new(vec![block("a"), block("b")]).unwrap();
    let regions = [bed.memory.region.clone(), Region { block: BlockId(1), ..other.region.clone() }];
    let ram = Process::source(bed.victim.pid, &layout, &regions).unwrap();
    bed.victim.store(other.page(7), 4096, 1);
    let mut sets = ram::PageSets::new(&layout);
    ram.populated(&mut sets).unwrap();
    assert_eq!((sets[BlockId(0)].len(), crate::bed::pages(&sets[BlockId(1)])), (0, vec![7]));
    assert!(ram.is_mapped(BlockId(0)) && !ram.is_mapped(BlockId(1)));
}
