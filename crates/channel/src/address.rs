//! Where a migration goes: the addresses that people write.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// Where to listen or connect.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// `tcp:HOST:PORT`, or `tcp:[::1]:PORT` for IPv6.
    Tcp {
        /// A name or an IP address, without brackets; IPv6 may carry a zone (`fe80::1%eth0`).
        host: String,
        /// 0 lets a listener choose one.
        port: u16,
    },
    /// `unix:PATH`.
    Unix {
        /// Of the socket file.
        path: PathBuf,
    },
}

impl Address {
    /// Whether bytes sent there stay on this machine: a loopback address, `localhost` (which RFC 6761 keeps for
    /// loopback) or a Unix socket. Any other name may lead anywhere.
    pub fn is_local(&self) -> bool {
        match self {
            Address::Unix { .. } => true,
            Address::Tcp { host, .. } => match host.parse::<IpAddr>() {
                Ok(address) => address.to_canonical().is_loopback(),
                Err(_) => host.eq_ignore_ascii_case("localhost"),
            },
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Address::Tcp { host: address.ip().to_string(), port: address.port() }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, into: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(into, "tcp:[{host}]:{port}"),
            Address::Tcp { host, port } => write!(into, "tcp:{host}:{port}"),
            Address::Unix { path } => write!(into, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = |why| AddressError { text: wire::shown(text), why };
        if let Some(path) = text.strip_prefix("unix:") {
            return unix(path).map_err(wrong);
        }
        match text.strip_prefix("tcp:") {
            Some(place) => tcp(place).map_err(wrong),
            None => Err(wrong("it starts with neither tcp: nor unix:")),
        }
    }
}

fn unix(path: &str) -> Result<Address, &'static str> {
    match path.len() {
        0 => Err("the path is missing"),
        1..=PATH_BYTES_MAX if !path.contains('\0') => Ok(Address::Unix { path: path.into() }),
        1..=PATH_BYTES_MAX => Err("the path has a NUL in it"),
        _ => Err("the path is longer than the 107 bytes that a socket may have"),
    }
}

fn tcp(place: &str) -> Result<Address, &'static str> {
    let (host, port) = place.rsplit_once(':').ok_or("the port is missing")?;
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|_| digits).ok_or("the port is not a number from 0 to 65535")?;
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let host = match bare {
        Some(inside) if inside.contains(':') => inside,
        Some(_) => return Err("what stands in brackets is not an IPv6 address"),
        None if host.contains(':') => return Err("an IPv6 address needs brackets"),
        None => host,
    };
    if host.is_empty() {
        return Err("the host is missing");
    }
    if host.chars().any(|character| character.is_whitespace() || "[]/".contains(character)) {
        return Err("the host is not a name or an IP address");
    }
    Ok(Address::Tcp { host: host.into(), port })
}

/// Why a text is not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("address {text:?}: {why}; write tcp:HOST:PORT, tcp:[::1]:PORT or unix:PATH")]
pub struct AddressError {
    text: String,
    why: &'static str,
}

/// Room in `sun_path` beside its NUL (unix(7)).
const PATH_BYTES_MAX: usize = 107;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_address_reads_back_from_its_text() {
        for text in [
            "tcp:host-7.example:4444",
            "tcp:127.0.0.1:0",
            "tcp:[::1]:65535",
            "tcp:[fe80::1%eth0]:9",
            "unix:/run/a b",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn only_what_stays_on_this_machine_is_local() {
        let local = |text: &str| text.parse::<Address>().unwrap().is_local();
        let here =
            ["unix:a", "tcp:127.9.9.9:1", "tcp:[::1]:1", "tcp:LocalHost:1", "tcp:[::ffff:127.0.0.1]:1"];
        assert!(here.into_iter().all(local));
        let away = [
            "tcp:0.0.0.0:1",
            "tcp:[::]:1",
            "tcp:10.0.0.1:1",
            "tcp:localhost.example:1",
            "tcp:[fe80::1%lo]:1",
        ];
        assert!(!away.into_iter().any(local));
    }

    #[test]
    fn a_wrong_address_is_answered_with_the_right_form() {
        for (text, why) in [
            ("host:1", "neither tcp: nor unix:"),
            ("tcp:host", "the port is missing"),
            ("tcp:host:", "not a number"),
            ("tcp:host:+1", "not a number"),
            ("tcp:host:65536", "not a number"),
            ("tcp::1", "the host is missing"),
            ("tcp:::1:1", "needs brackets"),
            ("tcp:[host]:1", "not an IPv6 address"),
            ("tcp:a b:1", "not a name"),
            ("tcp:host/x:1", "not a name"),
            ("unix:", "the path is missing"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(
                error.contains(why) && error.ends_with("write tcp:HOST:PORT, tcp:[::1]:PORT or unix:PATH"),
                "{error}"
            );
        }
        assert!(
            format!("unix:/{}", "x".repeat(107)).parse::<Address>().unwrap_err().to_string().contains("107")
        );
    }

    proptest! {
        #[test]
        fn any_text_is_an_address_that_reads_back_or_an_error(text in "(tcp:|unix:|)[\\[\\]:%a-f0-9./ \\PC]{0,40}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }
    }
}
