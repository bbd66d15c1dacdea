//! Runs what `engine` decided: at each end one main actor and N channel actors, each a `step` in a loop.
//!
//! At the source the [`Collector`] turns the guest's writes into rounds, and [`Sender`]s take packets of them from
//! the [`Feed`] and send them. At the target [`Lander`]s put packets in place, and the [`Keeper`] keeps the guest
//! paused until *commit*. [`source`] and [`target`] give each actor a thread; a test may as well step them all in
//! one thread. Knows sockets only as [`channel::Transport`], a VM only as [`SourceVm`] and [`TargetVm`].

mod collector;
mod counters;
mod desk;
mod digest;
mod feed;
mod inbox;
mod keeper;
mod lander;
mod landing;
mod line;
mod offer;
mod sender;
mod sorter;
pub mod source;
mod status;
mod sweep;
pub mod target;
mod threads;
mod vm;

pub use collector::{Asker, Clock, Collector, CollectorParts, Commit, Post, Step};
pub use counters::Counters;
pub use desk::{Agreement, Desk, Recall};
pub use digest::digest;
pub use feed::{Feed, Kind, Parcel, Work};
pub use inbox::Inbox;
pub use keeper::{Keeper, KeeperParts, TargetStep};
pub use lander::{Landed, Lander};
pub use landing::{Gate, Landing};
pub use offer::{Offer, PROTOCOL};
pub use sender::{Sender, SenderParts};
pub use status::{Ram, Status, ThreadCpu, Whimbrel};
pub use vm::{Attached, CommitError, CommitLine, SourceVm, StartError, TargetRam, TargetVm, Trouble, told};

/// What a main actor is told by the threads around it.
#[derive(Debug)]
pub enum Note {
    /// A control message from the other end.
    Message(wire::Message),
    /// A channel broke, and why.
    ChannelFailed {
        /// Its id.
        channel: u8,
        /// The error and its causes.
        reason: String,
    },
    /// The control connection ended, and why.
    Lost(String),
    /// The operator wants it to end.
    Cancel,
    /// Somebody at the source asks, on another connection, what became of the migration.
    Asked(std::sync::mpsc::Sender<wire::TargetState>),
    /// Something that a waiting actor looks at may have changed.
    Wake,
}
