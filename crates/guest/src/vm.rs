//! The guest at either end of a migration. Nothing outlives its process, so there is no watchdog and no record of a
//! commit: both ends are here, or neither is.

use crate::machine::Power;
use crate::memory::{BLOCK, Memory};
use crate::{Guest, GuestError};
use channel::Address;
use dirty::{Changes, DirtyError, Tracker};
use engine::{Limits, ZeroPageDetection};
use migrate::{
    Attached, CommitError, CommitLine, Inbox, Offer, SourceVm, StartError, Status, TargetVm, Trouble,
};
use migrate::{source, target};
use ram::{PageSets, Reach, Run};
use scan::Kernel;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use wire::{Format, Session, TargetState};

impl Guest {
    /// What it takes to move this guest to the target that listens at `address`, with 2 channels and the defaults of
    /// everything else; `session` is to be drawn at random.
    pub fn source_setup(&self, address: Address, session: Session) -> source::Setup {
        let status = Status {
            ram: migrate::Ram { total: self.ram_bytes(), ..Default::default() },
            ..Default::default()
        };
        source::Setup {
            vm: Box::new(Source { guest: self.clone(), ran: false }),
            offer: self.offer(),
            address,
            session,
            running: self.is_running(),
            channels: 2,
            format: Format::new(512 << 10).expect("512 KiB is a packet"),
            detection: ZeroPageDetection::default(),
            normal_page_ratio: 0,
            bandwidth: None,
            verify: false,
            limits: Limits::default(),
            kernel: Kernel::best(),
            inbox: Arc::new(Inbox::default()),
            status: Arc::new(Mutex::new(status)),
        }
    }

    /// What it takes to become the guest of a source that calls.
    pub fn target_setup(&self) -> target::Setup {
        let starts = Arc::new(AtomicBool::new(true));
        target::Setup {
            vm: Box::new(Target { guest: self.clone(), starts: starts.clone() }),
            ram: self.machine.memory.clone(),
            offer: self.offer(),
            kernel: Kernel::best(),
            inbox: Arc::new(Inbox::default()),
            status: Arc::new(Mutex::new(Status::default())),
            agreed: Box::new(move |hello| starts.store(hello.running, SeqCst)),
            recall: Box::new(|_| TargetState::Unknown),
        }
    }

    fn offer(&self) -> Offer {
        Offer {
            qemu: concat!("whimbrel-guest ", env!("CARGO_PKG_VERSION")).into(),
            machine: "whimbrel-guest".into(),
            cpu: "thread".into(),
            vcpus: self.machine.vcpu_count(),
            page_bits: None,
            layout: self.machine.memory.layout().clone(),
            uuid: [0; 16],
        }
    }

    fn ram_bytes(&self) -> u64 {
        self.machine.memory.layout().pages() * ram::PAGE as u64
    }
}

struct Source {
    guest: Guest,
    /// Whether it ran when it was stopped.
    ran: bool,
}

impl SourceVm for Source {
    /// There is no direct I/O, so every moment is a quiesced one.
    fn attach(&mut self, _quiesced: bool, populated: &mut PageSets) -> Result<Attached, Trouble> {
        let memory = self.guest.machine.memory.clone();
        let mut log = Log(memory.clone());
        log.arm()?;
        memory.populated(populated)?;
        Ok(Attached { tracker: Box::new(log), ram: memory })
    }

    fn stop(&mut self) -> Result<(), Trouble> {
        self.ran |= self.guest.pause();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), Trouble> {
        match std::mem::take(&mut self.ran) {
            true => Ok(self.guest.resume()?),
            false => Ok(()),
        }
    }

    fn save(&mut self) -> Result<Vec<u8>, Trouble> {
        Ok(serde_json::to_vec(&self.guest.machine.save())?)
    }

    fn commit(&mut self, line: &mut dyn CommitLine) -> Result<(), CommitError> {
        line.send().map_err(CommitError::Unsure)
    }

    fn retire(&mut self) -> Result<(), Trouble> {
        self.guest.machine.halt(Power::Ended);
        Ok(())
    }
}

struct Target {
    guest: Guest,
    /// Whether it ran at the source.
    starts: Arc<AtomicBool>,
}

impl TargetVm for Target {
    fn load(&mut self, state: &[u8]) -> Result<(), Trouble> {
        let tallies = serde_json::from_slice(state).map_err(|source| GuestError::State { source })?;
        Ok(self.guest.machine.load(tallies)?)
    }

    fn record_commit(&mut self) -> Result<(), Trouble> {
        Ok(())
    }

    fn start(&mut self) -> Result<(), StartError> {
        match self.starts.load(SeqCst) {
            true => Ok(self.guest.resume()?),
            false => Ok(()),
        }
    }

    fn end(&mut self) -> Result<(), Trouble> {
        self.guest.machine.halt(Power::Ended);
        Ok(())
    }
}

/// The guest notes its own writes, as a VMM does that keeps the dirty log of KVM.
struct Log(Arc<Memory>);

impl Tracker for Log {
    fn arm(&mut self) -> Result<(), DirtyError> {
        self.0.forget_written();
        Ok(())
    }

    fn collect(&mut self, into: &mut Changes) -> Result<(), DirtyError> {
        self.0.take_written(|page| into.insert_data(BLOCK, Run { first: page, count: 1 }));
        Ok(())
    }

    /// This guest never gives memory back.
    fn reconcile(&mut self, _sent: &PageSets, _into: &mut Changes) -> Result<(), DirtyError> {
        Ok(())
    }
}
