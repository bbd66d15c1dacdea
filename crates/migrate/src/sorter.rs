//! `zero-page-detection=legacy`: the main thread looks for zero pages, and the channels only send. The baseline
//! that the channels' own looking is measured against.

use crate::{Feed, Kind, Trouble};
use ram::{Batch, Reach, Window};
use scan::Kernel;

/// Looks at pages on the thread that steps it.
#[derive(Debug)]
pub(crate) struct Sorter {
    kernel: Kernel,
    pages_max: usize,
    window: Option<Window>,
    batch: Batch,
    zero: Vec<u64>,
    normal: Vec<u64>,
}

impl Sorter {
    /// A sorter of batches of `pages_max` pages. Its window is made when it is first needed.
    pub fn new(kernel: Kernel, pages_max: usize) -> Self {
        Self { kernel, pages_max, window: None, batch: Batch::with_room(0), zero: vec![], normal: vec![] }
    }

    /// Looks at pages of the round until the channels have enough to do. Nothing to do in other modes.
    pub fn step<R: Reach + ?Sized>(&mut self, feed: &Feed, ram: &R) -> Result<(), Trouble> {
        while feed.take_unsorted(&mut self.batch) {
            let window = self.window.get_or_insert_with(|| Window::new(self.pages_max));
            let pages = window.load(ram, &self.batch)?;
            self.zero.clear();
            self.normal.clear();
            for (place, &page) in self.batch.pages.iter().enumerate() {
                match self.kernel.is_zero(pages.page(place)) {
                    true => self.zero.push(page),
                    false => self.normal.push(page),
                }
            }
            feed.put_sorted(Kind::Zero, &self.batch, &self.zero);
            feed.put_sorted(Kind::Plain, &self.batch, &self.normal);
        }
        Ok(())
    }
}
