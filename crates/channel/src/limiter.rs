//! The rate limit that all channels share. Is told the time, and says how long to wait; does not wait itself.

use std::num::NonZeroU64;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A limit of bytes per second over all channels together.
#[derive(Debug)]
pub struct Limiter {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None is no limit.
    bytes_per_second: Option<NonZeroU64>,
    /// When everything handed out so far is paid for. None before the first bytes.
    paid_at: Option<Instant>,
}

impl Limiter {
    /// A limit, or none.
    pub fn new(bytes_per_second: Option<NonZeroU64>) -> Self {
        Self { state: Mutex::new(State { bytes_per_second, paid_at: None }) }
    }

    /// Takes `bytes` out of the limit. The caller is to wait for as long as the answer says, then to send them.
    pub fn take(&self, bytes: usize, now: Instant) -> Duration {
        let mut state = self.lock();
        let Some(rate) = state.bytes_per_second else { return Duration::ZERO };
        // Time that nobody used counts for a burst, no more.
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let from = state.paid_at.map_or(earliest, |paid_at| paid_at.max(earliest));
        let paid_at = from.checked_add(cost(bytes, rate)).unwrap_or(from);
        state.paid_at = Some(paid_at);
        paid_at.saturating_duration_since(now)
    }

    /// Changes the limit from now on. Who waits already waits as long as it was told.
    pub fn set_rate(&self, bytes_per_second: Option<NonZeroU64>) {
        let mut state = self.lock();
        *state = State { bytes_per_second, paid_at: None };
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long `bytes` take at a rate.
fn cost(bytes: usize, rate: NonZeroU64) -> Duration {
    let nanos = bytes as u128 * 1_000_000_000 / u128::from(rate.get());
    Duration::from_nanos(nanos.min(u128::from(u64::MAX)) as u64)
}

/// What a channel that was late may catch up. Linux wakes a sleeper within a few milliseconds even on a busy
/// machine; over one second a burst adds 2 %.
const BURST: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PACKET: usize = 512 << 10;

    fn mib(count: u64) -> Option<NonZeroU64> {
        NonZeroU64::new(count << 20)
    }

    /// Bytes that `channels` channels send within `within`, each waking `late` after it should.
    fn sent(limiter: &Limiter, channels: usize, late: Duration, from: Instant, within: Duration) -> u64 {
        let mut free = vec![from; channels];
        let mut sent = 0;
        loop {
            let next = free.iter_mut().min().unwrap();
            let wait = limiter.take(PACKET, *next);
            *next += if wait.is_zero() { Duration::from_micros(50) } else { wait + late };
            if *next > from + within {
                return sent;
            }
            sent += PACKET as u64;
        }
    }

    proptest! {
        #[test]
        fn a_second_carries_what_the_limit_says(
            rate in 32u64..4096,
            channels in 1usize..16,
            late_us in 0u64..2000,
        ) {
            let limiter = Limiter::new(mib(rate));
            let bytes = sent(&limiter, channels, Duration::from_micros(late_us), Instant::now(), Duration::from_secs(1));
            let share = bytes as f64 / (rate << 20) as f64;
            prop_assert!((0.95..=1.05).contains(&share), "{share}");
        }
    }

    #[test]
    fn no_limit_is_no_wait() {
        let limiter = Limiter::new(None);
        assert_eq!(limiter.take(usize::MAX, Instant::now()), Duration::ZERO);
    }

    #[test]
    fn a_pause_is_caught_up_for_one_burst_only() {
        let limiter = Limiter::new(mib(100));
        let start = Instant::now();
        sent(&limiter, 1, Duration::ZERO, start, Duration::from_secs(1));
        let later = start + Duration::from_secs(60);
        let bytes = sent(&limiter, 1, Duration::ZERO, later, Duration::from_millis(100));
        assert!(bytes <= (12 << 20) + PACKET as u64, "{bytes}: 100 ms and a burst of 20 ms");
    }

    #[test]
    fn a_new_rate_holds_for_the_next_bytes() {
        let limiter = Limiter::new(mib(1));
        let now = Instant::now();
        assert!(limiter.take(100 << 20, now) > Duration::from_secs(99));
        limiter.set_rate(mib(1000));
        let bytes = sent(&limiter, 4, Duration::ZERO, now, Duration::from_secs(1));
        assert!((950 << 20..1050 << 20).contains(&bytes), "{bytes}");
        limiter.set_rate(None);
        assert_eq!(limiter.take(100 << 20, now), Duration::ZERO);
    }

    #[test]
    fn the_slowest_limit_and_the_largest_packet_do_not_overflow() {
        let limiter = Limiter::new(NonZeroU64::new(1));
        let now = Instant::now();
        limiter.take(usize::MAX, now);
        assert!(limiter.take(usize::MAX, now) > Duration::from_secs(1 << 30));
    }
}
