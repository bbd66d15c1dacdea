//! Finds memory that was discarded without being reported as written: what the kernel leaves out, kind by kind.

use crate::outside::{Outside, SCAN};
use crate::watched::{Memory, Watched};
use crate::{Changes, DirtyError};
use ram::pagemap::{Query, category};
use ram::{PAGE, PageSet, PageSets};

impl Outside {
    /// Looks for what the kernel does not report as written though it is not what it was.
    pub(crate) fn find_discards(&mut self, region: &Watched, into: &mut Changes) -> Result<(), DirtyError> {
        match region.memory {
            Memory::Anonymous if self.stats.hole_scan => self.find_holes(region, into),
            Memory::PrivateFile => self.find_uncopied(region, into),
            Memory::Huge { shared: false } => self.find_unmapped(region, into),
            Memory::Huge { shared: true } => self.find_unmarked(region, into),
            Memory::Anonymous | Memory::Shared => Ok(()),
        }
    }

    /// Anonymous pages that are gone. Some kernels forget to report these.
    fn find_holes(&mut self, region: &Watched, into: &mut Changes) -> Result<(), DirtyError> {
        let mut absent = self.pages_that_are(region, ABSENT)?;
        let known = &mut self.known[region.block];
        absent.intersect(known);
        known.subtract(&absent);
        absent.runs().for_each(|run| into.insert_gone(region.block, run));
        Ok(())
    }

    /// Pages of a private mapping that were copies of its own and are not any more: discarded, so that they show the
    /// file again, or swapped out. The mark of protection stays behind, so nothing reports them.
    fn find_uncopied(&mut self, region: &Watched, into: &mut Changes) -> Result<(), DirtyError> {
        let copies = self.pages_that_are(region, COPIED)?;
        let of_file = self.pages_that_are(region, OF_FILE)?;
        let mut lost = PageSet::new(copies.pages());
        lost.insert(region.run());
        lost.intersect(&self.known[region.block]);
        lost.subtract(&copies);
        lost.runs().for_each(|run| into.insert_data(region.block, run));
        // A page that is merely not there comes back when it is read, and is known until it shows the file.
        self.known[region.block].subtract(&of_file);
        Ok(())
    }

    /// Private huge pages that are not there any more. The mark of protection stays behind here too. One that was
    /// touched again by now can't be told from what it was: private hugetlb must not be discarded from while it is
    /// watched.
    fn find_unmapped(&mut self, region: &Watched, into: &mut Changes) -> Result<(), DirtyError> {
        let mut absent = self.pages_that_are(region, UNMAPPED)?;
        absent.intersect(&self.known[region.block]);
        absent.runs().for_each(|run| into.insert_data(region.block, run));
        Ok(())
    }

    /// Shared huge pages that lost their mapping when they were written and not protected again: the kernel reports
    /// no huge page that isn't mapped. Protecting them first leaves a mark, so that they are found once.
    fn find_unmarked(&mut self, region: &Watched, into: &mut Changes) -> Result<(), DirtyError> {
        for run in self.pages_that_are(region, ABSENT)?.runs() {
            let start = region.host + (run.first - region.first_page) * PAGE as u64;
            let end = (start + run.count * PAGE as u64).next_multiple_of(region.page_bytes);
            self.uffd.protect(start..end).map_err(|error| self.failed(SCAN, region, error))?;
            self.settle_absent(region, run, into)?;
        }
        Ok(())
    }

    /// Pages of `sent`, or about to be sent, that were taken out of their file: holes now, or touched again.
    pub(crate) fn find_dropped(
        &self,
        region: &Watched,
        sent: &PageSets,
        into: &mut Changes,
    ) -> Result<u64, DirtyError> {
        let block = region.block;
        let mut dropped = PageSet::new(sent[block].pages());
        self.ram.dropped(block, region.run(), |run| dropped.insert(run))?;
        let mut asked = sent[block].clone();
        asked.union(&into.data[block]);
        dropped.intersect(&asked);
        dropped.runs().try_for_each(|run| self.settle_absent(region, run, into))?;
        dropped.intersect(&sent[block]);
        Ok(dropped.len())
    }

    fn pages_that_are(&mut self, region: &Watched, query: Query) -> Result<PageSet, DirtyError> {
        let mut pages = PageSet::new(self.known[region.block].pages());
        let found = self.pagemap.scan(region.addresses.clone(), query, &mut self.room, |stretch| {
            pages.insert(region.run_of(stretch));
        });
        self.stats.calls += found.map_err(|error| self.failed(SCAN, region, error))?;
        Ok(pages)
    }
}

/// Neither mapped nor swapped out.
const ABSENT: Query = Query {
    protect: false,
    registered: false,
    inverted: category::PRESENT | category::SWAPPED,
    all: category::PRESENT | category::SWAPPED,
    any: 0,
    report: category::PRESENT,
};

/// A private copy of a page of a file.
const COPIED: Query = Query {
    protect: false,
    registered: false,
    inverted: category::FILE,
    all: category::PRESENT | category::FILE,
    any: 0,
    report: category::PRESENT,
};

/// A page of a file.
const OF_FILE: Query = Query { inverted: 0, ..COPIED };

/// Not mapped, whatever else.
const UNMAPPED: Query = Query { inverted: category::PRESENT, all: category::PRESENT, ..ABSENT };
