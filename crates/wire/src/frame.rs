//! How messages are cut out of the control connection: a kind, a length, that many bytes.

use crate::WireError;
use crate::message::{DEVICE, is_known};
use crate::packet::be32;

/// First bytes of a control connection, "WHMB". A page channel starts with [`PAGE_MAGIC`](crate::PAGE_MAGIC)
/// instead, so a listener can tell them apart by four bytes.
pub const CONTROL_MAGIC: u32 = 0x5748_4d42;

/// What the source says first on a control connection: the magic, and four bytes that are zero.
pub const CONTROL_GREETING: [u8; 8] = *b"WHMB\0\0\0\0";

/// Bytes ahead of every message.
pub const FRAME_BYTES: usize = 8;

/// What stands ahead of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Which message, a number that is known.
    pub kind: u32,
    /// Bytes of it that follow, within the bound of its kind.
    pub bytes: usize,
}

impl Frame {
    /// Reads what stands ahead of a message. Fails on an unknown kind and on more bytes than its kind may have.
    pub fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, WireError> {
        let (kind, bytes) = (be32(bytes, 0), be32(bytes, 4));
        if !is_known(kind) {
            return Err(WireError::Kind { kind });
        }
        Self::new(kind, bytes as usize)
    }

    /// The frame of a message of `bytes` bytes. Fails if its kind may not have so many.
    pub(crate) fn new(kind: u32, bytes: usize) -> Result<Self, WireError> {
        let bytes_max = if kind == DEVICE { DEVICE_BYTES_MAX } else { JSON_BYTES_MAX };
        if bytes > bytes_max {
            return Err(WireError::TooLong { kind, bytes: bytes as u64, bytes_max });
        }
        Ok(Self { kind, bytes })
    }

    /// The bytes that [`Frame::decode`] reads.
    pub(crate) fn encode(self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&self.kind.to_be_bytes());
        bytes[4..].copy_from_slice(&(self.bytes as u32).to_be_bytes());
        bytes
    }
}

/// 1024 RAM blocks, each with a name of 255 characters, stay below this.
const JSON_BYTES_MAX: usize = 1 << 20;

/// A q35 with a few devices saves 32 KiB; a virtio-gpu with large surfaces can reach tens of MiB.
const DEVICE_BYTES_MAX: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greeting_is_the_magic() {
        assert_eq!(be32(&CONTROL_GREETING, 0), CONTROL_MAGIC);
    }

    #[test]
    fn an_unknown_kind_is_refused_by_its_number() {
        let bytes = Frame { kind: 999, bytes: 0 }.encode();
        assert_eq!(Frame::decode(&bytes), Err(WireError::Kind { kind: 999 }));
    }

    #[test]
    fn a_length_above_the_bound_of_the_kind_is_refused() {
        let hello = Frame { kind: 1, bytes: JSON_BYTES_MAX + 1 }.encode();
        assert!(matches!(Frame::decode(&hello), Err(WireError::TooLong { kind: 1, bytes: 1048577, .. })));
        let device = Frame { kind: DEVICE, bytes: DEVICE_BYTES_MAX };
        assert_eq!(Frame::decode(&device.encode()), Ok(device));
        let more = Frame { kind: DEVICE, bytes: u32::MAX as usize }.encode();
        assert!(matches!(Frame::decode(&more), Err(WireError::TooLong { .. })));
    }
}
