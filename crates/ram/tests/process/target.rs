//! Putting pages in place in another process.

use crate::bed::{Bed, batch, land, populated, zero};
use crate::victim::{HUGE, Kind};

#[test]
fn pages_land_where_they_belong() {
    for kind in Kind::ALL {
        let Some(bed) = Bed::new(kind, 8 * HUGE) else { continue };
        bed.store(40, 2, 9);
        let ram = bed.target();
        let pages = batch((0..2048).step_by(3).chain(2050..2100).chain([4095]));
        land(&ram, &pages, |page| page + 1);
        let words: Vec<u64> = pages.pages.iter().map(|page| page + 1).collect();
        assert_eq!(bed.words(pages.pages.clone()), words, "{kind:?}");
        assert_eq!(bed.words([40, 41, 4094]), [9, 9, 0], "{kind:?}");
    }
}

#[test]
fn zeroed_pages_read_as_zero_and_their_neighbours_stay() {
    for kind in Kind::ALL {
        let Some(bed) = Bed::new(kind, 4 * HUGE) else { continue };
        bed.store(0, 1024, 9);
        let ram = bed.target();
        zero(&ram, 1..2);
        zero(&ram, 100..700);
        zero(&ram, 1000..1500);
        let words = bed.words(0..2048);
        let zeroed = |page| page == 1 || (100..700).contains(&page) || page >= 1000;
        for page in 0..2048 {
            let wanted = if zeroed(page) { 0 } else { 9 };
            assert_eq!(words[page as usize], wanted, "{kind:?}: page {page}");
        }
    }
}

#[test]
fn zeroing_a_hole_leaves_it_a_hole() {
    for kind in Kind::ALL {
        let Some(bed) = Bed::new(kind, 4 * HUGE) else { continue };
        let ram = bed.target();
        zero(&ram, 0..2048);
        zero(&ram, 7..8);
        assert_eq!(populated(&ram), [0; 0], "{kind:?}");
        if kind.is_shared() && bed.memory.fd.is_some() {
            assert_eq!(bed.file_bytes(), 0, "{kind:?}");
        }
    }
}

#[test]
fn zeroing_gives_the_memory_of_files_back() {
    for kind in [Kind::Memfd, Kind::SharedAnonymous, Kind::Disk, Kind::TmpfsHuge] {
        let Some(bed) = Bed::new(kind, 4 * HUGE) else { continue };
        bed.store(0, 2048, 9);
        let ram = bed.target();
        zero(&ram, 512..2048);
        assert_eq!(populated(&ram), (0..512).collect::<Vec<_>>(), "{kind:?}");
    }
}

#[test]
fn zeroed_huge_pages_keep_their_place_in_the_pool() {
    let Some(bed) = Bed::new(Kind::Hugetlb, 4 * HUGE) else { return };
    bed.store(0, 1024, 9);
    let before = bed.file_bytes();
    zero(&bed.target(), 0..2048);
    assert_eq!(bed.file_bytes(), before, "a page that is freed may not be had again");
    assert_eq!(bed.words([0, 1023]), [0, 0]);
}

#[test]
fn a_private_mapping_does_not_show_its_file_where_it_is_zeroed() {
    let Some(bed) = Bed::new(Kind::PrivateFile, 2 * HUGE) else { return };
    let fd = bed.memory.fd.unwrap() as i64;
    let file = bed.victim.mmap(0, bed.memory.bytes, libc::MAP_SHARED, fd, 0).unwrap();
    bed.victim.store(file, 64 * 4096, 5);
    zero(&bed.target(), 0..32);
    assert_eq!(bed.words([0, 31, 32]), [0, 0, 5]);
    assert_eq!(bed.victim.load(file, 8), 5, "the file is another's");
}
