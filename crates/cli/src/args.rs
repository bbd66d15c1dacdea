//! The command line. Man pages and completions are made from this tree.

use crate::quantity::{parse_bandwidth, parse_bytes, parse_duration};
use channel::Address;
use clap::{Args, Parser, Subcommand, ValueEnum};
use engine::{TimeoutAction, ZeroPageDetection};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

/// Live migration for the QEMU VM that is already running: no patch, no restart, no options set in advance.
#[derive(Debug, Parser)]
#[command(name = "whimbrel", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Tell whether a VM can be moved from here, and what stands in the way
    Check(Check),
    /// Wait for a VM and take it into a QEMU that was started with `-incoming defer`
    Receive(Receive),
    /// Move a running VM to a target where `whimbrel receive` waits
    Migrate(Migrate),
    /// Show how a running migration is going
    Status(Job),
    /// End a running migration; the source runs on
    Cancel(Job),
    /// Find out which side owns a VM after a commit that was never answered
    Resolve(Resolve),
    /// Watch a live migration between two QEMUs that are started for it on this host
    Demo(Demo),
    /// Print shell completions
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the man pages
    #[command(hide = true)]
    Man {
        /// Where to
        directory: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct Check {
    /// QMP socket of the QEMU to look at
    #[arg(long, value_name = "SOCK")]
    pub qmp: PathBuf,
    /// Look at it as a target, which waits with `-incoming defer`
    #[arg(long)]
    pub target: bool,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Receive {
    /// Where to listen: tcp:HOST:PORT, tcp:[IPV6]:PORT or unix:PATH; port 0 takes a free one
    #[arg(value_name = "ADDRESS")]
    pub address: Address,
    /// QMP socket of the QEMU that waits
    #[arg(long, value_name = "SOCK")]
    pub qmp: PathBuf,
    /// Listen beyond this host without encryption or authentication
    #[arg(long)]
    pub insecure: bool,
    /// End with one JSON object on the last line
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Migrate {
    /// Where `whimbrel receive` listens: tcp:HOST:PORT, tcp:[IPV6]:PORT or unix:PATH
    #[arg(value_name = "ADDRESS")]
    pub address: Address,
    /// QMP socket of the QEMU whose VM is to be moved
    #[arg(long, value_name = "SOCK")]
    pub qmp: PathBuf,
    #[command(flatten)]
    pub tuning: Tuning,
    /// Leave the source's QEMU paused after the move; it is ended otherwise
    #[arg(long)]
    pub keep_source: bool,
    /// Send RAM beyond this host without encryption or authentication
    #[arg(long)]
    pub insecure: bool,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Clone, Debug, Args)]
pub struct Tuning {
    /// Page channels, 1 to 255
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: u8,
    /// Who looks for zero pages: none, legacy (the main thread) or multifd (every channel)
    #[arg(long, value_name = "MODE", default_value = "multifd")]
    pub zero_page_detection: ZeroPageDetection,
    /// Pages in a packet, in bytes: a power of two from 4KiB to 8MiB
    #[arg(long, value_name = "SIZE", default_value = "512KiB", value_parser = parse_bytes)]
    pub packet_size: u64,
    /// Send this share of the zero pages in full, in percent (a test aid)
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub normal_page_ratio: u8,
    /// How long the guest may stand still, for example 300ms
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = parse_duration)]
    pub max_downtime: Duration,
    /// What all channels together may send, for example 2.5Gbit or 300MiB (a second)
    #[arg(long, value_name = "RATE", value_parser = parse_bandwidth)]
    pub bandwidth: Option<NonZeroU64>,
    /// How long precopy may take, for example 10m
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// What to do then: fail (the source runs on) or switchover (stop the guest and send the rest)
    #[arg(long, value_name = "ACTION", default_value = "fail")]
    pub timeout_action: TimeoutAction,
    /// Compare digests of all RAM at both ends before the hand-over; the guest stands still meanwhile
    #[arg(long)]
    pub verify: bool,
}

#[derive(Clone, Debug, Args)]
pub struct Output {
    /// End with one JSON object on the last line
    #[arg(long)]
    pub json: bool,
    /// How to show progress
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub progress: Progress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Progress {
    /// A bar on a terminal, plain lines elsewhere
    Auto,
    /// A bar that is drawn again
    Bar,
    /// A line a second
    Plain,
    /// Nothing
    None,
}

#[derive(Debug, Args)]
pub struct Job {
    /// QMP socket of its QEMU; needed where several run
    #[arg(long, value_name = "SOCK")]
    pub qmp: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Resolve {
    /// QMP socket of the QEMU at this end
    #[arg(long, value_name = "SOCK")]
    pub qmp: PathBuf,
    /// Start the guest here if this end turns out to own it
    #[arg(long)]
    pub start: bool,
}

#[derive(Debug, Args)]
pub struct Demo {
    /// The guest that checks its own memory, as tests/guests/multiboot/build.sh makes it
    #[arg(long, value_name = "FILE")]
    pub guest: Option<PathBuf>,
    /// Firmware that boots it fast where KVM itself is emulated
    #[arg(long, value_name = "FILE")]
    pub firmware: Option<PathBuf>,
    /// RAM of the guest: a quarter of it is worked on, the rest stays untouched
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_bytes)]
    pub size: u64,
    /// Page channels, 1 to 255
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..))]
    pub channels: u8,
    /// What all channels together may send, to watch it for longer, for example 500Mbit (a second)
    #[arg(long, value_name = "RATE", value_parser = parse_bandwidth)]
    pub bandwidth: Option<NonZeroU64>,
    /// Who runs the guest's instructions
    #[arg(long, value_name = "ACCEL", default_value = "auto")]
    pub accel: Accel,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Accel {
    /// KVM if it boots the guest within seconds, else QEMU's translator
    Auto,
    /// The kernel
    Kvm,
    /// QEMU's translator
    Tcg,
}
