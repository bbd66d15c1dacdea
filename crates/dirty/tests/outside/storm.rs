//! Rounds while the memory is being written: what was sent at the end is what the VM has.

use crate::victim::{HUGE, Kind};
use crate::watch::{RAM, Watch};
use dirty::{Changes, Kvm, Options, Tracker};
use ram::{Batch, Cursor, PAGE, PageSets, Window};
use std::time::{Duration, Instant};

/// What was sent so far.
struct Copy {
    bytes: Vec<u8>,
    window: Window,
}

impl Copy {
    fn new(pages: u64) -> Self {
        Self { bytes: vec![0; pages as usize * PAGE], window: Window::new(128) }
    }

    fn page(&mut self, page: u64) -> &mut [u8] {
        &mut self.bytes[page as usize * PAGE..][..PAGE]
    }

    fn send(&mut self, watch: &Watch, pages: &PageSets) {
        let (mut cursor, mut batch) = (Cursor::default(), Batch::with_room(128));
        while cursor.fill(pages, &mut batch, 128) {
            let located = self.window.load(&*watch.ram, &batch).unwrap();
            for (place, &page) in batch.pages.iter().enumerate() {
                located.page(place).copy_to(&mut self.bytes[page as usize * PAGE..][..PAGE]);
            }
        }
    }

    fn take(&mut self, watch: &Watch, changes: &Changes) {
        self.send(watch, &changes.data);
        for page in changes.gone[RAM].runs().flat_map(|run| run.first..run.end()) {
            self.page(page).fill(0);
        }
    }
}

#[test]
fn a_copy_made_in_rounds_equals_the_memory_after_the_last() {
    let kvm = |refault: Duration| Options { kvm: Some(Kvm { vcpus: 2, refault }), ..Options::default() };
    let ways = [
        Options::default(),
        kvm(Duration::from_micros(2)),
        Options { hole_scan: true, ..Options::default() },
    ];
    for kind in Kind::ALL {
        for options in ways {
            let fill = Watch::with(kind, 8 * HUGE, options, |victim, memory| {
                victim.store(memory.at, memory.bytes / 2, 7);
                victim.storm(memory.at, memory.pages(), 2);
            });
            let Some(watch) = fill else { continue };
            rounds(watch);
        }
    }
}

fn rounds(mut watch: Watch) {
    let kind = watch.memory.kind;
    let mut copy = Copy::new(watch.memory.pages());
    let mut changes = Changes::new(&watch.memory.layout);
    watch.tracker.populated(&mut changes.data).unwrap();
    copy.take(&watch, &changes);
    let patience = Instant::now() + Duration::from_secs(20);
    let mut rounds_with_writes = 0;
    while rounds_with_writes < 12 {
        changes.clear();
        watch.tracker.collect(&mut changes).unwrap();
        rounds_with_writes += u32::from(!changes.is_empty());
        copy.take(&watch, &changes);
        assert!(Instant::now() < patience, "{kind:?}: nothing is written, so this proves nothing");
    }
    watch.victim.calm();
    changes.clear();
    watch.tracker.collect(&mut changes).unwrap();
    copy.take(&watch, &changes);
    let mut all = PageSets::new(&watch.memory.layout);
    all[RAM].insert(ram::Run { first: 0, count: watch.memory.pages() });
    let mut truth = Copy::new(watch.memory.pages());
    truth.send(&watch, &all);
    let wrong = (0..watch.memory.pages()).filter(|&page| copy.page(page) != truth.page(page)).count();
    assert_eq!(wrong, 0, "{kind:?}");
}
