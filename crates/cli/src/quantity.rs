//! Numbers with units, as people type them. A bare number is refused: it has cost others an outage.

use std::num::NonZeroU64;
use std::time::Duration;

/// `300ms`, `10s`, `5m`, `1.5h`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let seconds = scaled(text, &DURATIONS, "a time like 300ms, 10s or 5m")?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text:?} is out of range"))
}

/// `512KiB`, `2GiB`, `1MB`: bytes, a whole number of them.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    whole(text, scaled(text, &BYTES, "a size like 512KiB, 64MiB or 2GiB")?)
}

/// `2.5Gbit`, `300MiB`: bytes a second.
pub fn parse_bandwidth(text: &str) -> Result<NonZeroU64, String> {
    let text = text.strip_suffix("/s").unwrap_or(text);
    let rates: Vec<_> = BITS.iter().chain(&BYTES).copied().collect();
    let bytes = whole(text, scaled(text, &rates, "a rate like 2.5Gbit or 300MiB")?)?;
    NonZeroU64::new(bytes)
        .ok_or_else(|| "a bandwidth of zero moves nothing; leave it out for no limit".into())
}

fn scaled(text: &str, units: &[(&str, f64)], example: &str) -> Result<f64, String> {
    let split = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is not {example}"))?;
    match units.iter().find(|(name, _)| *name == unit) {
        Some((_, scale)) => Ok(number * scale),
        None if unit.is_empty() => Err(format!("{text:?} has no unit; write {example}")),
        None => Err(format!("{unit:?} is not a unit here; write {example}")),
    }
}

fn whole(text: &str, bytes: f64) -> Result<u64, String> {
    match bytes < 2f64.powi(53) {
        true => Ok(bytes.round() as u64),
        false => Err(format!("{text:?} is out of range")),
    }
}

const DURATIONS: [(&str, f64); 5] = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];

const BYTES: [(&str, f64); 9] = [
    ("B", 1.0),
    ("KiB", 1024.0),
    ("MiB", 1048576.0),
    ("GiB", 1073741824.0),
    ("TiB", 1099511627776.0),
    ("kB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
];

const BITS: [(&str, f64); 4] = [("bit", 0.125), ("kbit", 125.0), ("Mbit", 125e3), ("Gbit", 125e6)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_type_is_understood() {
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_duration("1.5h"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse_bytes("512KiB"), Ok(512 << 10));
        assert_eq!(parse_bandwidth("2.5Gbit").unwrap().get(), 312_500_000);
        assert_eq!(parse_bandwidth("300MiB/s").unwrap().get(), 300 << 20);
    }

    #[test]
    fn a_number_without_a_unit_is_refused_and_the_right_form_shown() {
        assert_eq!(
            parse_duration("300"),
            Err("\"300\" has no unit; write a time like 300ms, 10s or 5m".into())
        );
        assert!(parse_bandwidth("100").unwrap_err().contains("2.5Gbit"));
    }

    #[test]
    fn nonsense_is_refused_with_what_was_typed() {
        for text in ["", "ms", "1.2.3s", "-5s", "5parsec", "NaNs", "infs", "99999999999999999999h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert!(parse_bytes("99999999999TiB").unwrap_err().contains("out of range"));
        assert!(parse_bandwidth("0bit").unwrap_err().contains("zero"));
    }
}
