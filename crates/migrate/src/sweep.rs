//! Finds out which pages are not zero. To read a page costs a quarter of giving its memory back and getting it again;
//! and memory that the target was given in advance stays its own.

use crate::Trouble;
use ram::{Batch, BlockId, Reach, Run, Window};
use scan::Kernel;

/// Reads pages, as many at a time as a packet has.
#[derive(Debug)]
pub(crate) struct Sweep {
    kernel: Kernel,
    window: Window,
    batch: Batch,
    pages_max: usize,
}

impl Sweep {
    /// A sweep that reads at most `pages_max` pages at a time.
    pub fn new(kernel: Kernel, pages_max: usize) -> Self {
        Self { kernel, window: Window::new(pages_max), batch: Batch::with_room(pages_max), pages_max }
    }

    /// Appends to `found` those of `pages` that are not zero. They must exist: to read a hole would allocate it.
    pub fn find<R: Reach + ?Sized>(
        &mut self,
        ram: &R,
        block: BlockId,
        pages: impl IntoIterator<Item = u64>,
        found: &mut Vec<Run>,
    ) -> Result<(), Trouble> {
        let mut pages = pages.into_iter();
        self.batch.block = block;
        loop {
            self.batch.pages.clear();
            self.batch.pages.extend(pages.by_ref().take(self.pages_max));
            if self.batch.pages.is_empty() {
                return Ok(());
            }
            let here = self.window.load(ram, &self.batch)?;
            for (place, &page) in self.batch.pages.iter().enumerate() {
                if !self.kernel.is_zero(here.page(place)) {
                    note(found, page);
                }
            }
        }
    }
}

/// Makes the last run a page longer if `page` follows it.
fn note(runs: &mut Vec<Run>, page: u64) {
    match runs.last_mut() {
        Some(last) if last.end() == page => last.count += 1,
        _ => runs.push(Run { first: page, count: 1 }),
    }
}
