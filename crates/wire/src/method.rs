//! How the pages of a packet are compressed, and QEMU's numbers and names for it.

use crate::{WireError, shown};
use std::fmt;
use std::str::FromStr;

/// How the pages of a packet are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Not at all: the payload is the pages, in the order of the header.
    None,
}

impl Method {
    /// Every method there is.
    pub const ALL: [Method; 1] = [Method::None];

    /// QEMU's name of it, as in `multifd-compression`.
    pub fn name(self) -> &'static str {
        match self {
            Method::None => "none",
        }
    }

    /// Its bits in the flags of a packet.
    pub(crate) fn flags(self) -> u32 {
        match self {
            Method::None => 0,
        }
    }

    /// The method that the bits of [`METHOD_MASK`] stand for. Fails by name on one that is QEMU's but not ours.
    pub(crate) fn from_flags(flags: u32) -> Result<Self, WireError> {
        if let Some(method) = Self::ALL.into_iter().find(|method| method.flags() == flags) {
            return Ok(method);
        }
        match QEMU_METHODS.iter().find(|(bit, _)| *bit == flags) {
            Some((_, method)) => Err(WireError::Method { method }),
            None => Err(WireError::Methods { flags }),
        }
    }

    /// Bytes of payload that `pages` pages make, where the method settles it beforehand.
    pub(crate) fn payload_bytes(self, pages: usize) -> u64 {
        match self {
            Method::None => (pages * ram::PAGE) as u64,
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, into: &mut fmt::Formatter<'_>) -> fmt::Result {
        into.write_str(self.name())
    }
}

impl FromStr for Method {
    type Err = NoSuchMethod;

    fn from_str(name: &str) -> Result<Self, NoSuchMethod> {
        let found = Self::ALL.into_iter().find(|method| method.name() == name);
        found.ok_or_else(|| NoSuchMethod { name: shown(name) })
    }
}

/// A compression method that this whimbrel does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("compression method {name:?} is not among those of this whimbrel: none")]
pub struct NoSuchMethod {
    name: String,
}

/// The flags of QEMU's methods (migration/multifd.h). One at most is set.
const QEMU_METHODS: [(u32, &str); 5] =
    [(0x02, "zlib"), (0x04, "zstd"), (0x08, "qpl"), (0x10, "uadk"), (0x20, "qatzip")];

/// All bits of [`QEMU_METHODS`].
pub(crate) const METHOD_MASK: u32 = 0x3e;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_of_qemu_that_is_missing_is_refused_by_its_name() {
        assert_eq!(Method::from_flags(0), Ok(Method::None));
        assert_eq!(Method::from_flags(0x04), Err(WireError::Method { method: "zstd" }));
        assert_eq!(Method::from_flags(0x06), Err(WireError::Methods { flags: 0x06 }));
        assert_eq!("none".parse(), Ok(Method::None));
        assert!("zlib\x1b".parse::<Method>().unwrap_err().to_string().contains("\"zlib\""));
    }

    #[test]
    fn the_mask_is_the_methods() {
        assert_eq!(QEMU_METHODS.iter().fold(0, |mask, (bit, _)| mask | bit), METHOD_MASK);
    }
}
