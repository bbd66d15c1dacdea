//! The bytes of a migration: packets of the page channels in QEMU's multifd format, and the messages of the
//! control connection. Does no I/O. Whatever is decoded comes from a peer that may lie: nothing here panics on
//! it, allocates before a bound was checked, or lets an offset leave its RAM block.

mod error;
mod frame;
mod hex;
mod message;
mod method;
mod opening;
mod packet;
mod text;

pub use error::WireError;
pub use frame::{CONTROL_GREETING, CONTROL_MAGIC, FRAME_BYTES, Frame};
pub use hex::{Hash, HexError, Session};
pub use message::{Accept, Hello, Message, TargetState};
pub use method::{Method, NoSuchMethod};
pub use opening::{OPENING_BYTES, Opening};
pub use packet::{Arrived, Format, PAGE_MAGIC, Packet, decode};
pub use text::shown;
