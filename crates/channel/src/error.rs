//! Why a connection did not come about.

use crate::Address;
use std::io;

/// Why a connection did not come about.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ChannelError {
    #[error("cannot find out where {address} is")]
    Resolve { address: Address, source: io::Error },
    #[error("cannot listen on {address}")]
    Listen { address: Address, source: io::Error },
    #[error("cannot accept connections on {address}")]
    Accept { address: Address, source: io::Error },
    #[error("cannot connect to {address}")]
    Connect { address: Address, source: io::Error },
    #[error("{peer} connected but said nothing usable")]
    Silent { peer: String, source: io::Error },
    #[error("{peer} connected but does not speak to us: it starts with {first:#010x}{hint}")]
    Stranger { peer: String, first: u32, hint: &'static str },
}
