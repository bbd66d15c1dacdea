//! QEMU as the source of a migration.

use crate::faults::{self, Rule};
use crate::runtime::{End, Record};
use dirty::{Changes, DirtyError, Kvm, Options, Outside, Stats, Tracker};
use migrate::{Attached, CommitError, CommitLine, SourceVm, Trouble};
use qemu::guard::GuardError;
use qemu::{Accelerator, Guard, Vm};
use ram::{Layout, PageSets, Process, Region};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A running QEMU with the guard that outlives us beside it.
pub struct QemuSource {
    pub vm: Vm,
    pub guard: Guard,
    pub layout: Layout,
    pub regions: Vec<Region>,
    pub accelerator: Accelerator,
    pub vcpus: u32,
    /// Whether the guest runs; one that its owner has paused is never run by us.
    pub running: bool,
    /// Leave QEMU paused after the move.
    pub keep: bool,
    pub record: Record,
    pub facts: Arc<Mutex<SourceFacts>>,
}

/// What was seen of the VM on the way, for the summary.
#[derive(Clone, Debug, Default)]
pub struct SourceFacts {
    /// How long a thread of QEMU stood still for the attach.
    pub attach_stop: Duration,
    /// Stops for scans with no direct I/O in flight, and how long they were together.
    pub barriers: u64,
    pub barrier_time: Duration,
    /// RAM blocks that are mapped, so that a device can reach them, and bytes of all mapped blocks.
    pub mapped_blocks: usize,
    pub mapped_bytes: u64,
    pub tracker: Stats,
    stopped_at: Option<Instant>,
}

impl QemuSource {
    fn facts(&self) -> std::sync::MutexGuard<'_, SourceFacts> {
        self.facts.lock().expect("no holder panics")
    }
}

impl SourceVm for QemuSource {
    fn attach(&mut self, quiesced: bool, populated: &mut PageSets) -> Result<Attached, Trouble> {
        let (uffd, stood_still) = self.guard.borrow_userfaultfd()?;
        let ram = Arc::new(Process::source(self.vm.pid(), &self.layout, &self.regions)?);
        let kvm = (self.accelerator == Accelerator::Kvm).then(|| Kvm::on_this_host(self.vcpus));
        let mut tracker = Outside::new(uffd, ram.clone(), Options { kvm, hole_scan: false })?;
        tracker.arm()?;
        if quiesced {
            // Direct I/O that was in flight while protection was put up ends here, before the first page is read.
            // What begins later is reported.
            let stopped = self.stop();
            self.resume()?;
            stopped?;
        }
        tracker.populated(populated)?;
        let mapped = self.layout.iter().filter(|(id, _)| ram.is_mapped(*id));
        let (blocks, bytes) =
            mapped.fold((0, 0), |(count, sum), (_, block)| (count + 1, sum + block.used_bytes));
        let mut facts = self.facts();
        (facts.attach_stop, facts.mapped_blocks, facts.mapped_bytes) = (stood_still, blocks, bytes);
        drop(facts);
        let tracker = Box::new(Watched { outside: tracker, facts: self.facts.clone() });
        Ok(Attached { tracker, ram })
    }

    fn stop(&mut self) -> Result<(), Trouble> {
        if self.running {
            self.guard.arm()?;
            self.facts().stopped_at = Some(Instant::now());
            self.vm.stop(STOP_MAX)?;
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Trouble> {
        if self.running {
            self.vm.cont()?;
            self.guard.disarm()?;
            let mut facts = self.facts();
            facts.barriers += 1;
            let stood_still = facts.stopped_at.take().map_or(Duration::ZERO, |at| at.elapsed());
            facts.barrier_time += stood_still;
        }
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, Trouble> {
        Ok(qemu::device::save(&mut self.vm)?)
    }

    /// The guard writes it, so that our own death can't fall between its duty and the message.
    fn commit(&mut self, line: &mut dyn CommitLine) -> Result<(), CommitError> {
        let unsent = |error: Trouble| CommitError::Unsent(error);
        self.record.keep().map_err(|error| unsent(error.into()))?;
        let (socket, message) = line.socket().expect("a migration between QEMUs has a socket");
        match self.guard.commit(socket, message) {
            Ok(()) => Ok(()),
            Err(error @ GuardError::Unsent { .. }) => Err(unsent(error.into())),
            Err(error) => Err(CommitError::Unsure(error.into())),
        }
    }

    fn retire(&mut self) -> Result<(), Trouble> {
        self.record.forget()?;
        if !self.keep {
            self.vm.quit()?;
        }
        Ok(())
    }
}

/// The tracker, telling the summary what it did.
struct Watched {
    outside: Outside,
    facts: Arc<Mutex<SourceFacts>>,
}

impl Watched {
    fn tell(&self) {
        self.facts.lock().expect("no holder panics").tracker = self.outside.stats();
    }
}

impl Tracker for Watched {
    fn arm(&mut self) -> Result<(), DirtyError> {
        self.outside.arm()
    }

    fn collect(&mut self, into: &mut Changes) -> Result<(), DirtyError> {
        let collected = self.outside.collect(into);
        self.tell();
        collected
    }

    fn reconcile(&mut self, sent: &PageSets, into: &mut Changes) -> Result<(), DirtyError> {
        if faults::is_off(Rule::Discards) {
            return Ok(());
        }
        let reconciled = self.outside.reconcile(sent, into);
        self.tell();
        reconciled
    }
}

/// `stop` waits until every disk has done what it was asked to; a slow one takes half a second for 8 MiB.
const STOP_MAX: Duration = Duration::from_secs(10);

/// The record that the source keeps of its commit.
pub fn record(session: wire::Session, qemu_pid: i32, target: &channel::Address, running: bool) -> Record {
    let state = wire::TargetState::Unknown;
    Record { session, end: End::Source, qemu_pid, target: Some(target.to_string()), running, state }
}
