//! The connections of a migration: addresses, listening and dialling, whole runs of bytes in and out by
//! [`Transport`], messages over it, and the rate limit that all channels share. Knows how bytes are cut into
//! messages (`wire`), not what they are about.

mod address;
mod control;
mod error;
mod limiter;
mod listener;
mod stream;
mod transport;
mod unix;
mod vectored;

pub use address::{Address, AddressError};
pub use control::{Control, ControlError};
pub use error::ChannelError;
pub use limiter::Limiter;
pub use listener::Listener;
pub use stream::{Caller, Kind, Stream, classify};
pub use transport::Transport;
