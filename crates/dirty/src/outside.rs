//! Watches the writes of a VM in another process: asynchronous userfaultfd write protection, read and set again by
//! `PAGEMAP_SCAN`. Knows memory and how the kernel reports it, not what becomes of the pages.

use crate::maps::Maps;
use crate::watched::{Is, Memory, Watched, chunks, holds_data};
use crate::{Changes, DirtyError, Probes, Tracker};
use ram::pagemap::{self, Pagemap, Query, Stretch, category};
use ram::uffd::Uffd;
use ram::{PAGE, PageSets, Process, Run};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the tracker is to know of the VM.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The VM runs under KVM, which then drops its own mappings of every range that is cleared.
    pub kvm: Option<Kvm>,
    /// Looks for discards by an additional scan even if this kernel reports them all.
    pub hole_scan: bool,
}

/// What it costs a VM under KVM to get back mappings that a clear took from it.
#[derive(Clone, Copy, Debug)]
pub struct Kvm {
    /// How many vCPUs share that work.
    pub vcpus: u32,
    /// What one page costs.
    pub refault: Duration,
}

impl Kvm {
    /// Takes the cost of a page from what kind of page tables this host's KVM uses: it can't be measured from
    /// outside without taking mappings away. 2 us is usual on bare metal; with shadow page tables, in a nested VM,
    /// 23 us were measured.
    pub fn on_this_host(vcpus: u32) -> Self {
        let is_on =
            |path: &str| std::fs::read_to_string(path).is_ok_and(|text| matches!(text.trim(), "Y" | "1"));
        let two_dimensional = cfg!(not(target_arch = "x86_64"))
            || is_on("/sys/module/kvm_intel/parameters/ept")
            || is_on("/sys/module/kvm_amd/parameters/npt");
        Self { vcpus, refault: Duration::from_micros(if two_dimensional { 2 } else { 23 }) }
    }
}

/// What the tracker did and what it cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Rounds collected.
    pub rounds: u64,
    /// Scan calls, those that clear and those that only look.
    pub calls: u64,
    /// Stretches of written pages that they found.
    pub stretches: u64,
    /// Pages reported as data, over all rounds.
    pub data_pages: u64,
    /// Pages reported as gone, over all rounds.
    pub gone_pages: u64,
    /// Time in `arm`.
    pub arm: Duration,
    /// Time in `collect`, over all rounds.
    pub collect: Duration,
    /// Time in `reconcile`.
    pub reconcile: Duration,
    /// Regions that `reconcile` looked at, having no hint that nothing was discarded from them.
    pub reconciled_regions: u64,
    /// Sent pages that `reconcile` found taken out of their file: holes now, or touched again since.
    pub discarded_pages: u64,
    /// Whether discards of private memory are looked for by an additional scan.
    pub hole_scan: bool,
    /// What this kernel reports.
    pub probes: Option<Probes>,
}

/// Watches a VM in another process. Dropping it ends the watching and leaves no trace in the VM.
#[derive(Debug)]
pub struct Outside {
    pub(crate) uffd: Uffd,
    pub(crate) ram: Arc<Process>,
    pub(crate) pagemap: Pagemap,
    watched: Arc<[Watched]>,
    maps: Maps,
    probes: Probes,
    kvm: Option<Kvm>,
    /// What one small clearing call takes, as seen so far.
    call_cost: Duration,
    /// Private pages that held data when watching began; see [`Outside::populated`].
    held: PageSets,
    /// Pages that were there when they were last reported, where their going is not reported; see
    /// [`Outside::find_discards`].
    pub(crate) known: PageSets,
    pub(crate) room: Box<[Stretch]>,
    pub(crate) stats: Stats,
}

impl Outside {
    /// Watches the RAM that `ram` reaches, by a userfaultfd that was made in the VM's process. Takes `uffd` over:
    /// no copy of it may be left anywhere, or protection would outlive us.
    pub fn new(uffd: OwnedFd, ram: Arc<Process>, options: Options) -> Result<Self, DirtyError> {
        let uffd = Uffd::new(uffd).map_err(|source| DirtyError::Unsupported { source })?;
        let probes = Probes::run().map_err(|source| DirtyError::Probe { source })?;
        let maps = Maps::new(ram.pid(), ram.layout(), ram.regions())?;
        let pid = ram.pid();
        let pagemap = Pagemap::open(pid).map_err(|source| DirtyError::Maps { pid, source })?;
        let watched = ram.regions().map(|region| Watched::new(region, &ram)).collect();
        let hole_scan = options.hole_scan || probes.needs_hole_scan();
        let tracker = Self {
            held: PageSets::new(ram.layout()),
            known: PageSets::new(ram.layout()),
            stats: Stats { hole_scan, probes: Some(probes), ..Stats::default() },
            call_cost: if options.kvm.is_some() { KVM_CALL_COST } else { CALL_COST },
            kvm: options.kvm,
            room: pagemap::room(),
            uffd,
            ram,
            pagemap,
            watched,
            maps,
            probes,
        };
        for region in tracker.watched.iter() {
            let addresses = region.addresses.clone();
            tracker
                .uffd
                .register(addresses)
                .map_err(|error| tracker.failed("UFFDIO_REGISTER", region, error))?;
        }
        Ok(tracker)
    }

    /// Adds every page that held data when `arm` ran or that was given data since. To be called once after `arm`;
    /// the VM may run meanwhile.
    ///
    /// This loses no page, whatever its state. Private memory is listed by the same calls that protect it: the
    /// kernel looks at a page and protects it under one lock, so what it called absent is written only later, and
    /// then reported. (To look before and after protecting is not enough: a page that is first written and
    /// then swapped out between the two looks like the marker of a protected hole.) Memory of files is asked of
    /// the file, which keeps its data until it is discarded, mapped or not, swapped out or not, so asking late
    /// finds all that was there.
    pub fn populated(&mut self, into: &mut PageSets) -> Result<(), DirtyError> {
        into.union(&self.held);
        for region in self.watched.iter() {
            let block = region.block;
            self.ram.stored(block, region.run(), |run| into[block].insert(run))?;
        }
        Ok(())
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Protects a region and lists what private memory holds at that moment.
    fn arm_region(&mut self, region: &Watched) -> io::Result<()> {
        match region.memory {
            Memory::Shared => region.chunks().try_for_each(|chunk| self.pagemap.protect(chunk)),
            // Not by a scan: one that takes in holes can lock up the kernel on untouched huge pages.
            Memory::Huge { shared: true } => self.uffd.protect(region.addresses.clone()),
            // Nor does one that takes in written pages only; holes then stay unprotected, and reading one counts
            // as writing it.
            Memory::Huge { shared: false } => self.arm_and_list(region, category::WRITTEN),
            Memory::Anonymous | Memory::PrivateFile => self.arm_and_list(region, 0),
        }
    }

    fn arm_and_list(&mut self, region: &Watched, all: u64) -> io::Result<()> {
        let (held, known) = (&mut self.held[region.block], &mut self.known[region.block]);
        for chunk in region.chunks() {
            self.stats.calls +=
                self.pagemap.scan(chunk, Query { all, ..CLEAR }, &mut self.room, |stretch| {
                    let run = region.run_of(stretch);
                    if holds_data(stretch.categories) {
                        held.insert(run);
                        if region.memory.is_own(stretch.categories) {
                            known.insert(run);
                        }
                    }
                })?;
        }
        Ok(())
    }

    fn collect_region(&mut self, region: &Watched, into: &mut Changes) -> Result<(), DirtyError> {
        let extents = self.look(region, into).map_err(|error| self.failed(SCAN, region, error))?;
        let mut absent = Vec::new();
        for extent in extents {
            self.clear(region, extent, into, &mut absent)
                .map_err(|error| self.failed(SCAN, region, error))?;
        }
        // Asked after the clear, so that what is written later is reported later.
        absent.into_iter().try_for_each(|run| self.settle_absent(region, run, into))?;
        self.find_discards(region, into)
    }

    /// Finds what was written, which is fast and costs the guest nothing, and plans what to clear. Under KVM every
    /// range that is cleared is lost to the guest, pages that were not written too.
    fn look(&mut self, region: &Watched, into: &mut Changes) -> io::Result<Vec<Range<u64>>> {
        let gap_bytes_max = self.gap_bytes_max();
        let mut extents: Vec<Range<u64>> = Vec::new();
        self.stats.calls += self.pagemap.scan(region.addresses.clone(), LOOK, &mut self.room, |stretch| {
            into.insert_data(region.block, region.run_of(stretch));
            match extents.last_mut() {
                Some(last) if stretch.start - last.end <= gap_bytes_max => last.end = stretch.end,
                _ => extents.push(stretch.start..stretch.end),
            }
        })?;
        Ok(extents.into_iter().flat_map(chunks).collect())
    }

    /// A gap is cleared along where that costs less than one more call: to the guest under KVM, else to us.
    fn gap_bytes_max(&self) -> u64 {
        let page_cost = self.kvm.map_or(CLEAN_PAGE_COST, |kvm| kvm.refault / kvm.vcpus.max(1));
        (self.call_cost.as_nanos() / page_cost.as_nanos().max(1)) as u64 * PAGE as u64
    }

    /// Clears a stretch of addresses and sorts what was written. `absent` gets pages of files that aren't mapped.
    fn clear(
        &mut self,
        region: &Watched,
        extent: Range<u64>,
        into: &mut Changes,
        absent: &mut Vec<Run>,
    ) -> io::Result<()> {
        let started = Instant::now();
        let pages = (extent.end - extent.start) / PAGE as u64;
        let (mut stretches, sorted) = (0, self.probes.hole_is_written);
        let query = if sorted { CLEAR } else { CLEAR_UNSORTED };
        let known = &mut self.known[region.block];
        self.stats.calls += self.pagemap.scan(extent, query, &mut self.room, |stretch| {
            stretches += 1;
            let run = region.run_of(stretch);
            match region.memory.is(stretch.categories, sorted) {
                Is::Data => {
                    into.insert_data(region.block, run);
                    if region.memory.is_own(stretch.categories) {
                        known.insert(run);
                    }
                }
                Is::Hole => into.insert_gone(region.block, run),
                Is::Unmapped => absent.push(run),
            }
        })?;
        self.stats.stretches += stretches;
        if pages <= SMALL_CALL_PAGES {
            self.call_cost = (self.call_cost * 7 + started.elapsed()) / 8;
        }
        Ok(())
    }

    /// Written pages of a file that are not mapped: swapped out, unmapped, or punched.
    pub(crate) fn settle_absent(
        &self,
        region: &Watched,
        run: Run,
        into: &mut Changes,
    ) -> Result<(), DirtyError> {
        into.insert_gone(region.block, run);
        self.ram.stored(region.block, run, |data| into.insert_data(region.block, data))?;
        Ok(())
    }

    /// What a failed call means. The mappings tell more than the error does.
    pub(crate) fn failed(&self, call: &'static str, region: &Watched, source: io::Error) -> DirtyError {
        if source.raw_os_error() == Some(libc::ESRCH) {
            return DirtyError::Gone { pid: self.ram.pid() };
        }
        if let Err(reason) = self.maps.check() {
            return reason;
        }
        let (block, host) = (self.ram.layout().block(region.block).name.clone(), region.host);
        if call == SCAN && source.raw_os_error() == Some(libc::EPERM) {
            return DirtyError::Unwatched { block, host };
        }
        DirtyError::Kernel { call, block, host, bytes: region.pages * PAGE as u64, source }
    }
}

impl Tracker for Outside {
    fn arm(&mut self) -> Result<(), DirtyError> {
        let started = Instant::now();
        let watched = self.watched.clone();
        for region in watched.iter() {
            self.arm_region(region).map_err(|error| self.failed(SCAN, region, error))?;
        }
        self.stats.arm += started.elapsed();
        self.maps.check()
    }

    fn collect(&mut self, into: &mut Changes) -> Result<(), DirtyError> {
        let started = Instant::now();
        let before = (into.data.len(), into.gone.len());
        let watched = self.watched.clone();
        for region in watched.iter() {
            self.collect_region(region, into)?;
        }
        self.stats.rounds += 1;
        self.stats.data_pages += into.data.len().saturating_sub(before.0);
        self.stats.gone_pages += into.gone.len().saturating_sub(before.1);
        self.stats.collect += started.elapsed();
        // A scan of memory that is not mapped finds nothing and says nothing, so this is looked at last.
        self.maps.check()
    }

    fn reconcile(&mut self, sent: &PageSets, into: &mut Changes) -> Result<(), DirtyError> {
        let (started, watched) = (Instant::now(), self.watched.clone());
        // Each hint is asked before its region is looked at: what is discarded meanwhile is for the next time.
        for region in watched.iter().filter(|region| region.is_shared() && region.hint.fired()) {
            self.stats.reconciled_regions += 1;
            self.stats.discarded_pages += self.find_dropped(region, sent, into)?;
        }
        self.stats.reconcile += started.elapsed();
        Ok(())
    }
}

pub(crate) const SCAN: &str = "protecting by PAGEMAP_SCAN or UFFDIO_WRITEPROTECT";

/// Finds what was written.
const LOOK: Query = Query {
    protect: false,
    registered: true,
    inverted: 0,
    all: category::WRITTEN,
    any: 0,
    report: category::WRITTEN,
};

/// Clears what was written, by the loop of the kernel that also sees holes where the general one does not.
const CLEAR_UNSORTED: Query = Query { protect: true, ..LOOK };

/// Clears what was written and tells in the same breath what is there.
const CLEAR: Query = Query {
    protect: true,
    registered: true,
    inverted: 0,
    all: category::WRITTEN,
    any: 0,
    report: category::PRESENT | category::SWAPPED | category::ZERO | category::FILE,
};

/// What a small clearing call takes, until it was measured.
const CALL_COST: Duration = Duration::from_nanos(1500);

/// The same under KVM, where the kernel also makes the vCPUs let go of the range.
const KVM_CALL_COST: Duration = Duration::from_micros(80);

/// What a clearing call takes for a page that was not written.
const CLEAN_PAGE_COST: Duration = Duration::from_nanos(40);

/// Up to here the time of a call is that of the call and not of its pages.
const SMALL_CALL_PAGES: u64 = 16;
