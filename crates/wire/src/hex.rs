//! Bytes that people and JSON see as hexadecimal text: sessions, hashes and UUIDs.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::fmt;
use std::str::FromStr;

/// One migration: drawn at random by the source, named by both ends and by `whimbrel resolve`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Session(#[serde(with = "self")] pub [u8; 16]);

/// A hash of 256 bits over a RAM block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Hash(#[serde(with = "self")] pub [u8; 32]);

impl fmt::Display for Session {
    fn fmt(&self, into: &mut fmt::Formatter<'_>) -> fmt::Result {
        into.write_str(&text(&self.0))
    }
}

impl FromStr for Session {
    type Err = HexError;

    fn from_str(text: &str) -> Result<Self, HexError> {
        parse(text).map(Self)
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, into: &mut fmt::Formatter<'_>) -> fmt::Result {
        into.write_str(&text(&self.0))
    }
}

/// Why a text is not the hexadecimal form of what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not {digits} hexadecimal digits")]
pub struct HexError {
    digits: usize,
}

/// For serde, by `#[serde(with = "hex")]`.
pub(crate) fn serialize<S: Serializer, const N: usize>(bytes: &[u8; N], into: S) -> Result<S::Ok, S::Error> {
    into.serialize_str(&text(bytes))
}

/// For serde, by `#[serde(with = "hex")]`.
pub(crate) fn deserialize<'de, D: Deserializer<'de>, const N: usize>(from: D) -> Result<[u8; N], D::Error> {
    parse(&String::deserialize(from)?).map_err(D::Error::custom)
}

fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse<const N: usize>(text: &str) -> Result<[u8; N], HexError> {
    let wrong = HexError { digits: 2 * N };
    if text.len() != 2 * N {
        return Err(wrong);
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low).ok_or(wrong)?;
    }
    Ok(bytes)
}

fn digit(character: u8) -> Option<u8> {
    char::from(character).to_digit(16).map(|digit| digit as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_reads_back_from_its_text() {
        let session = Session(*b"\x00\x01\x7f\xff0123456789ab");
        assert_eq!(session.to_string(), "00017fff303132333435363738396162");
        assert_eq!(session.to_string().parse(), Ok(session));
    }

    #[test]
    fn text_of_the_wrong_length_or_digits_is_refused() {
        for text in ["", "00", "+0017fff303132333435363738396162", "éé017fff30313233343536373839616"] {
            assert_eq!(text.parse::<Session>(), Err(HexError { digits: 32 }), "{text}");
        }
    }
}
