//! What a run is made of: two VMs, the parameters of the migration, and what goes wrong. Everything else follows
//! from the seed.

use crate::fault::{self, Planned};
use crate::guest::Habits;
use crate::memory::Backing;
use crate::{Sabotage, Seed};
use engine::{Limits, TimeoutAction, ZeroPageDetection};
use migrate::Offer;
use ram::{Block, Layout, PAGE};
use std::time::Duration;
use wire::{Hello, Session};

/// A RAM block.
#[derive(Clone, Copy, Debug)]
pub struct BlockPlan {
    /// How many pages it has.
    pub pages: u64,
    /// How it is reached at the source.
    pub source: Backing,
    /// How it is reached at the target.
    pub target: Backing,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What everything else is drawn from.
    pub seed: Seed,
    /// RAM.
    pub blocks: Vec<BlockPlan>,
    /// Whether the guest runs when the migration begins.
    pub was_running: bool,
    /// What the guest does.
    pub habits: Habits,
    /// `multifd-channels`.
    pub channels: u8,
    /// Pages of a packet.
    pub packet_pages: u32,
    /// `zero-page-detection`.
    pub detection: ZeroPageDetection,
    /// `multifd-normal-page-ratio`.
    pub normal_page_ratio: u8,
    /// Whether digests are compared.
    pub verify: bool,
    /// What the decisions keep to.
    pub limits: Limits,
    /// Packets that a socket's buffer holds.
    pub packets_ahead: usize,
    /// The longest time that a step takes.
    pub pace: Duration,
    /// How many times as slow one actor is as the others.
    pub sluggishness: u32,
    /// What goes wrong.
    pub faults: Vec<Planned>,
    /// What is wrong from the start.
    pub sabotage: Option<Sabotage>,
}

impl Plan {
    /// A plain run in which nothing goes wrong.
    pub fn plain(seed: Seed) -> Self {
        let block = |pages, source, target| BlockPlan { pages, source, target };
        Self {
            seed,
            blocks: vec![
                block(120, Backing::Private, Backing::Mapped),
                block(40, Backing::Mapped, Backing::Private),
            ],
            was_running: true,
            habits: Habits {
                write: 8,
                zero: 2,
                discard: 1,
                touch: 1,
                direct_io: 0,
                hot_pages: 20,
                calm_after: 3000,
            },
            channels: 2,
            packet_pages: 8,
            detection: ZeroPageDetection::Multifd,
            normal_page_ratio: 0,
            verify: false,
            limits: Limits::default(),
            packets_ahead: 2,
            pace: Duration::from_micros(200),
            sluggishness: 1,
            faults: vec![],
            sabotage: None,
        }
    }

    /// A run in which everything is drawn from the seed, faults as well.
    pub fn drawn(seed: Seed) -> Self {
        let random = &mut fastrand::Rng::with_seed(seed.0 ^ 0x0070_6c61_6e00);
        Self { faults: fault::draw(random), ..Self::drawn_without_faults(seed) }
    }

    /// A run in which everything is drawn from the seed and nothing goes wrong.
    pub fn drawn_without_faults(seed: Seed) -> Self {
        let random = &mut fastrand::Rng::with_seed(seed.0);
        let direct_io = random.u8(..3) == 0;
        let downtime_max = Duration::from_millis(pick(random, &[300, 300, 24, 21]));
        let pace = Duration::from_micros(pick(random, &[20, 100, 400, 2000]));
        let timeout = Some(pace * random.u32(300..4000));
        let timeout_action = pick(random, &[TimeoutAction::Switchover, TimeoutAction::Fail]);
        Self {
            blocks: (0..random.usize(1..4)).map(|_| BlockPlan::drawn(random)).collect(),
            was_running: random.u8(..10) > 0,
            habits: Habits::drawn(random, direct_io),
            channels: random.u8(1..5),
            packet_pages: 1 << random.u32(..5),
            detection: pick(
                random,
                &[ZeroPageDetection::None, ZeroPageDetection::Legacy, ZeroPageDetection::Multifd],
            ),
            normal_page_ratio: pick(random, &[0, 0, 0, 50, 100]),
            verify: random.u8(..4) == 0,
            limits: Limits { downtime_max, timeout, timeout_action, direct_io },
            packets_ahead: random.usize(1..4),
            pace,
            sluggishness: pick(random, &[1, 1, 10, 40]),
            ..Self::plain(seed)
        }
    }

    /// The RAM blocks of both VMs.
    pub(crate) fn layout(&self) -> Layout {
        let block = |(at, block): (usize, &BlockPlan)| Block {
            name: format!("block{at}"),
            used_bytes: block.pages * PAGE as u64,
            page_bytes: PAGE as u64,
        };
        Layout::new(self.blocks.iter().enumerate().map(block).collect()).expect("the plan's blocks are sound")
    }

    /// What both ends say of their VM.
    pub(crate) fn offer(&self) -> Offer {
        Offer {
            qemu: "10.0.2".into(),
            machine: "pc-q35-10.0".into(),
            cpu: "qemu64-x86_64-cpu".into(),
            vcpus: 2,
            page_bits: None,
            layout: self.layout(),
            uuid: [0; 16],
        }
    }

    /// What the source proposes.
    pub(crate) fn hello(&self) -> Hello {
        let packet_bytes = self.packet_pages * PAGE as u32;
        self.offer().hello(self.session(), self.channels, packet_bytes, self.verify, self.was_running)
    }

    /// The migration's name.
    pub(crate) fn session(&self) -> Session {
        let mut bytes = [0x5e; 16];
        bytes[..8].copy_from_slice(&self.seed.0.to_le_bytes());
        Session(bytes)
    }
}

impl BlockPlan {
    fn drawn(random: &mut fastrand::Rng) -> Self {
        let backings = [Backing::Private, Backing::Mapped];
        Self { pages: random.u64(1..100), source: pick(random, &backings), target: pick(random, &backings) }
    }
}

impl Habits {
    fn drawn(random: &mut fastrand::Rng, direct_io: bool) -> Self {
        Self {
            write: random.u32(1..10),
            zero: random.u32(..4),
            discard: random.u32(..4),
            touch: random.u32(..3),
            direct_io: if direct_io { random.u32(1..6) } else { 0 },
            hot_pages: random.usize(1..60),
            calm_after: random.u64(..4000),
        }
    }
}

/// One of these.
pub(crate) fn pick<T: Copy>(random: &mut fastrand::Rng, among: &[T]) -> T {
    among[random.usize(..among.len())]
}
