//! Tells which pages the simulated guest wrote, with the blind spots of the real trackers: direct I/O in flight is
//! seen when it is submitted, and a discard of mapped memory is not seen at all.

use crate::Sabotage;
use crate::memory::Memory;
use dirty::{Changes, DirtyError, Tracker};
use ram::{BlockId, PageSets, Run};
use std::sync::Arc;

/// Watches a [`Memory`] until it is dropped.
pub(crate) struct SimTracker {
    memory: Arc<Memory>,
    sabotage: Option<Sabotage>,
    reports: u64,
}

impl SimTracker {
    pub(crate) fn new(memory: Arc<Memory>, sabotage: Option<Sabotage>) -> Self {
        Self { memory, sabotage, reports: 0 }
    }

    fn forgets(&mut self) -> bool {
        self.reports += 1;
        self.sabotage == Some(Sabotage::TrackerForgets) && self.reports.is_multiple_of(10)
    }
}

impl Tracker for SimTracker {
    fn arm(&mut self) -> Result<(), DirtyError> {
        self.memory.watch();
        Ok(())
    }

    fn collect(&mut self, into: &mut Changes) -> Result<(), DirtyError> {
        for block in (0..self.memory.layout().len()).map(|at| BlockId(at as u16)) {
            let mut from = 0;
            while let Some((page, populated)) = self.memory.take_written(block, from) {
                let run = Run { first: page, count: 1 };
                if self.forgets() {
                } else if populated {
                    into.insert_data(block, run);
                } else {
                    into.insert_gone(block, run);
                }
                from = page + 1;
                self.memory.meanwhile();
            }
        }
        Ok(())
    }

    fn reconcile(&mut self, sent: &PageSets, into: &mut Changes) -> Result<(), DirtyError> {
        if self.sabotage == Some(Sabotage::DiscardsAreMissed) {
            return Ok(());
        }
        let mut held = sent.clone();
        held.union(&into.data);
        let (mut gone, mut data) = (PageSets::new(self.memory.layout()), PageSets::new(self.memory.layout()));
        self.memory.take_unseen(&held, &mut gone, &mut data);
        into.merge(&Changes { data, gone });
        Ok(())
    }
}

impl Drop for SimTracker {
    fn drop(&mut self) {
        self.memory.unwatch();
    }
}
