//! Foretells the downtime: what is left to send at the measured rate, and the parts that every switchover costs.

use serde::Serialize;
use std::time::Duration;

/// What a stop would cost now, in its parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Parts {
    /// Sending the pages that are left.
    pub ram: Duration,
    /// Stopping, saving and loading device state, starting again.
    pub devices: Duration,
    /// Waiting for the other end's answers.
    pub round_trips: Duration,
}

impl Parts {
    /// All parts together.
    pub fn total(self) -> Duration {
        self.ram + self.devices + self.round_trips
    }
}

/// Rates as measured so far.
#[derive(Clone, Copy, Debug)]
pub struct Forecast {
    page_time: Duration,
    round_trip: Duration,
    stop: Duration,
}

impl Default for Forecast {
    fn default() -> Self {
        Self { page_time: PAGE_TIME_START, round_trip: Duration::ZERO, stop: Duration::ZERO }
    }
}

impl Forecast {
    /// Learns from a round: `pages` pages with data were sent in `took`. Small rounds say more about the
    /// scheduler than about the link and are not used.
    pub fn learn(&mut self, pages: u64, took: Duration) {
        if pages >= LEARN_PAGES_MIN {
            self.page_time = took.div_f64(pages as f64);
        }
    }

    /// Learns how long the target takes to answer.
    pub fn learn_round_trip(&mut self, took: Duration) {
        self.round_trip = took;
    }

    /// Learns how long the guest takes to stop: a slow disk has to do first what it was asked to.
    pub fn learn_stop(&mut self, took: Duration) {
        self.stop = took;
    }

    /// What stopping the guest with `pages` left to send would cost.
    pub fn downtime(&self, pages: u64) -> Parts {
        Parts {
            ram: self.page_time.mul_f64(pages as f64),
            devices: DEVICES + self.stop,
            round_trips: self.round_trip * SWITCHOVER_ROUND_TRIPS,
        }
    }

    /// Pages with data that can be sent in a second.
    pub fn pages_per_second(&self) -> u64 {
        (1.0 / self.page_time.as_secs_f64().max(1e-9)).round() as u64
    }
}

/// Before anything is measured: 4 KiB in 32 us is 1 Gbit/s.
const PAGE_TIME_START: Duration = Duration::from_micros(32);

/// 1,024 pages are 4 MiB: several packets on each of the usual channels.
const LEARN_PAGES_MIN: u64 = 1024;

/// Measured on QEMU 10: stop 0.5 ms, save 2.5 ms, load 8 to 13 ms, scans and starting a few more.
const DEVICES: Duration = Duration::from_millis(20);

/// The last sync to ready, and commit to running.
const SWITCHOVER_ROUND_TRIPS: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_of_data_teaches_the_rate_and_a_small_one_does_not() {
        let mut forecast = Forecast::default();
        forecast.learn(100_000, Duration::from_secs(1));
        assert_eq!(forecast.downtime(1000).ram, Duration::from_millis(10));
        forecast.learn(3, Duration::from_secs(1));
        assert_eq!(forecast.pages_per_second(), 100_000);
    }

    #[test]
    fn a_stop_is_never_foretold_as_free() {
        let mut forecast = Forecast::default();
        assert!(forecast.downtime(0).total() >= DEVICES);
        forecast.learn_stop(Duration::from_secs(1));
        assert!(forecast.downtime(0).total() > Duration::from_secs(1), "a disk that drains for a second");
    }
}
