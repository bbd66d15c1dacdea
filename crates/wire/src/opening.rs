//! The first packet of a page channel: which VM, which migration, which of its channels.

use crate::packet::{PAGE_MAGIC, VERSION, be32};
use crate::{Session, WireError};

/// What a page channel says first, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The UUID of the source's VM; zero where it has none.
    pub uuid: [u8; 16],
    /// Which of the channels this is, from 0.
    pub channel: u8,
    /// The migration it belongs to, in bytes that QEMU leaves unused. Zero with a stock QEMU.
    pub session: Session,
}

/// Bytes of an opening.
pub const OPENING_BYTES: usize = 64;

impl Opening {
    /// The bytes as QEMU has them: magic, version, UUID, channel, and zeros but for the session.
    pub fn encode(&self) -> [u8; OPENING_BYTES] {
        let mut bytes = [0; OPENING_BYTES];
        bytes[0..4].copy_from_slice(&PAGE_MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_be_bytes());
        bytes[8..24].copy_from_slice(&self.uuid);
        bytes[24] = self.channel;
        bytes[32..48].copy_from_slice(&self.session.0);
        bytes
    }

    /// Reads an opening of one of `channels` channels. QEMU itself up to 10.2 lets channel N of N through and
    /// writes past its array; we don't. Unused bytes are not looked at.
    pub fn decode(bytes: &[u8], channels: u8) -> Result<Self, WireError> {
        let what = "opening of a channel";
        let Ok(bytes): Result<&[u8; OPENING_BYTES], _> = bytes.try_into() else {
            return Err(WireError::Length { what, bytes: bytes.len(), wanted: OPENING_BYTES });
        };
        let (magic, version, channel) = (be32(bytes, 0), be32(bytes, 4), bytes[24]);
        if magic != PAGE_MAGIC {
            return Err(WireError::Magic { what, magic, wanted: PAGE_MAGIC });
        }
        if version != VERSION {
            return Err(WireError::Version { what, version, wanted: VERSION });
        }
        if channel >= channels {
            return Err(WireError::Channel { channel, channels });
        }
        let sixteen = |at: usize| std::array::from_fn(|offset| bytes[at + offset]);
        Ok(Self { uuid: sixteen(8), channel, session: Session(sixteen(32)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_opening_reads_back(uuid: [u8; 16], session: [u8; 16], channel in 0u8..255) {
            let opening = Opening { uuid, channel, session: Session(session) };
            prop_assert_eq!(Opening::decode(&opening.encode(), channel + 1), Ok(opening));
        }

        #[test]
        fn any_bytes_are_an_opening_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..80), channels: u8) {
            if let Ok(opening) = Opening::decode(&bytes, channels) {
                prop_assert!(opening.channel < channels);
            }
        }
    }

    #[test]
    fn a_channel_beyond_the_last_is_refused() {
        let bytes = Opening { uuid: [0; 16], channel: 4, session: Session([0; 16]) }.encode();
        assert_eq!(Opening::decode(&bytes, 4), Err(WireError::Channel { channel: 4, channels: 4 }));
    }

    #[test]
    fn an_opening_of_something_else_is_refused_with_what_it_has() {
        let mut bytes = Opening { uuid: [0; 16], channel: 0, session: Session([0; 16]) }.encode();
        bytes[7] = 2;
        assert!(matches!(Opening::decode(&bytes, 1), Err(WireError::Version { version: 2, .. })));
        bytes[0] = b'Q';
        assert!(matches!(Opening::decode(&bytes, 1), Err(WireError::Magic { magic: 0x51223344, .. })));
        assert!(matches!(Opening::decode(&bytes[1..], 1), Err(WireError::Length { bytes: 63, .. })));
    }
}
