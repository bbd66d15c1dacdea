//! Why bytes of a peer are refused. Text of the peer inside an error has gone through [`shown`](crate::shown).

/// Why bytes of a peer are refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum WireError {
    #[error("{what} of {bytes} bytes where {wanted} are due")]
    Length { what: &'static str, bytes: usize, wanted: usize },
    #[error("{what} starts with {magic:#010x}, not {wanted:#010x}")]
    Magic { what: &'static str, magic: u32, wanted: u32 },
    #[error("{what} of version {version}; this whimbrel reads version {wanted}")]
    Version { what: &'static str, version: u32, wanted: u32 },
    #[error("channel {channel} of {channels}")]
    Channel { channel: u8, channels: u8 },

    #[error("packet size of {bytes} bytes is not a power of two from 4096 to 8388608")]
    PacketBytes { bytes: u32 },
    #[error("packet has unknown flags: {flags:#x}")]
    Flags { flags: u32 },
    #[error("packet is compressed with {method}, which this whimbrel does not have")]
    Method { method: &'static str },
    #[error("packet names more than one compression method: flags {flags:#x}")]
    Methods { flags: u32 },
    #[error("packet has room for {allocated} pages; at most {pages_max} were agreed on")]
    Room { allocated: u32, pages_max: u32 },
    #[error("packet announces {normal} normal and {zero} zero pages in room for {allocated}")]
    Counts { normal: u32, zero: u32, allocated: u32 },
    #[error("packet announces {bytes} bytes for {normal} pages that need {wanted}")]
    Payload { bytes: u32, normal: u32, wanted: u64 },
    #[error("packet is for RAM block {name:?}, which this VM does not have")]
    Block { name: String },
    #[error("packet has offset {offset:#x} in RAM block {block}, which is not on a page boundary")]
    Unaligned { block: String, offset: u64 },
    #[error("packet has offset {offset:#x} in RAM block {block} of {bytes:#x} bytes")]
    Outside { block: String, offset: u64, bytes: u64 },
    #[error("packet has page {page} of RAM block {block} twice")]
    Twice { block: String, page: u64 },

    #[error("message of unknown kind {kind}: the other end is no whimbrel, or a newer one")]
    Kind { kind: u32 },
    #[error("message {kind} of {bytes} bytes; at most {bytes_max} are allowed")]
    TooLong { kind: u32, bytes: u64, bytes_max: usize },
    #[error("message {kind} cannot be read: {reason}")]
    Unreadable { kind: u32, reason: String },
    #[error("message {kind} says it is a message {inside}")]
    Mismatch { kind: u32, inside: u32 },
    #[error("message {kind} has {what} {value:?}")]
    Value { kind: u32, what: &'static str, value: String },
}
