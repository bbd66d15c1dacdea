//! What to measure, as the environment says: `make bench-qemu RUNS=5 SIZE=4G CASES=zero,half` hands its variables on.

use crate::case::{Case, Memory};
use harness::Accel;
use std::fmt::Debug;
use std::fs::OpenOptions;

/// What to measure and how often.
#[derive(Debug)]
pub struct Settings {
    /// `RUNS`: how often each mover moves each VM.
    pub runs: u32,
    /// `SIZE`: guest RAM in MiB; `2G` and `2048M` are the same.
    pub ram_mib: u64,
    /// `CHANNELS`: page channels of both movers.
    pub channels: u8,
    /// `CASES`: what RAM holds.
    pub cases: Vec<Case>,
    /// `MEMORY`: where RAM lies.
    pub memories: Vec<Memory>,
    /// `ACCEL`: `kvm` or `tcg`; KVM where it can be had.
    pub accel: Accel,
    /// `JSON=1`: one object on the last line.
    pub json: bool,
    /// `RECORD=1`: keep every sample under `bench/record`.
    pub record: bool,
}

impl Settings {
    /// Reads the environment. Panics on a value that makes no sense, naming it.
    pub fn from_environment() -> Self {
        Self {
            runs: number("RUNS", 3),
            ram_mib: variable("SIZE").map_or(2048, |text| mib(&text)),
            channels: number("CHANNELS", 4),
            cases: list("CASES", &Case::ALL),
            memories: list("MEMORY", &Memory::ALL),
            accel: list("ACCEL", &[default_accel()])[0],
            json: variable("JSON").is_some_and(|text| text != "0"),
            record: variable("RECORD").is_some_and(|text| text != "0"),
        }
    }

    /// One line for people.
    pub fn told(&self) -> String {
        format!(
            "{} MiB, {} channels, {} runs each in turn, {}, target preallocated; QEMU with multifd and \
             zero-page-detection=multifd",
            self.ram_mib,
            self.channels,
            self.runs,
            self.accel.name(),
        )
    }

    /// RAM in GiB.
    pub fn ram_gib(&self) -> f64 {
        self.ram_mib as f64 / 1024.0
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

fn number<N: std::str::FromStr<Err: Debug>>(name: &str, otherwise: N) -> N {
    let parse =
        |text: String| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number that fits"));
    variable(name).map_or(otherwise, parse)
}

fn list<T: Listed>(name: &str, otherwise: &[T]) -> Vec<T> {
    let Some(text) = variable(name) else { return otherwise.to_vec() };
    let find = |word: &str| T::LISTED.iter().copied().find(|item| item.told() == word);
    text.split(',').map(|word| find(word).unwrap_or_else(|| panic!("{name}={word} is not known"))).collect()
}

/// What a list may name.
trait Listed: Copy + 'static {
    const LISTED: &'static [Self];

    fn told(self) -> &'static str;
}

impl Listed for Case {
    const LISTED: &'static [Self] = &Case::ALL;

    fn told(self) -> &'static str {
        self.name()
    }
}

impl Listed for Memory {
    const LISTED: &'static [Self] = &Memory::ALL;

    fn told(self) -> &'static str {
        self.name()
    }
}

impl Listed for Accel {
    const LISTED: &'static [Self] = &Accel::ALL;

    fn told(self) -> &'static str {
        self.name()
    }
}

/// `2G`, `512M` or a number of MiB.
fn mib(text: &str) -> u64 {
    let (digits, factor) = match text.strip_suffix(['G', 'g']) {
        Some(digits) => (digits, 1024),
        None => (text.strip_suffix(['M', 'm']).unwrap_or(text), 1),
    };
    let number: Option<u64> = digits.parse().ok();
    number.unwrap_or_else(|| panic!("SIZE={text} is no size; say 2G or 512M")) * factor
}

fn default_accel() -> Accel {
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => Accel::Kvm,
        Err(_) => Accel::Tcg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_with_and_without_its_unit() {
        assert_eq!([mib("2G"), mib("512M"), mib("300")], [2048, 512, 300]);
    }
}
