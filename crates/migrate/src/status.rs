//! How a migration is going, in the words of QEMU's `query-migrate`.

use crate::Counters;
use ram::PAGE;
use serde::Serialize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The state of a migration. Times are in milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Status {
    /// setup, active, device, completed, failed, cancelled.
    pub status: String,
    /// Since the start.
    pub total_time: u64,
    /// Until the first page was sent.
    pub setup_time: u64,
    /// How long the guest stood still, once it runs at the target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime: Option<u64>,
    /// What stopping the guest now would cost.
    pub expected_downtime: u64,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_desc: Option<String>,
    /// RAM.
    pub ram: Ram,
    /// What QEMU has no word for.
    pub whimbrel: Whimbrel,
}

/// RAM of a migration. Pages are of `page_size` bytes.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Ram {
    /// Bytes sent, headers included.
    pub transferred: u64,
    /// Bytes that wait to be sent.
    pub remaining: u64,
    /// Bytes of all RAM blocks.
    pub total: u64,
    /// Zero pages announced.
    pub duplicate: u64,
    /// Pages sent in full.
    pub normal: u64,
    /// Bytes of those.
    pub normal_bytes: u64,
    /// Mbit/s, at present; at the end over the whole migration.
    pub mbps: f64,
    /// Pages a second, zero pages included, at present.
    pub pages_per_second: u64,
    /// Pages a second that the guest writes.
    pub dirty_pages_rate: u64,
    /// How often written pages were collected.
    pub dirty_sync_count: u64,
    /// Bytes of a page.
    pub page_size: u64,
}

/// What whimbrel adds to `query-migrate`.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Whimbrel {
    /// Rounds sent.
    pub rounds: u64,
    /// Pages that were never read because they were never touched, in round 0.
    pub holes_skipped: u64,
    /// Pages that became holes and were announced without being read.
    pub discarded: u64,
    /// What the stop was expected to cost when it was decided, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_downtime: Option<u64>,
    /// Bytes of device state.
    pub device_bytes: u64,
    /// CPU time of each thread.
    pub threads: Vec<ThreadCpu>,
}

/// CPU time of a thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ThreadCpu {
    /// `live_migration`, `multifdsend_0`, …
    pub name: String,
    /// User and system time in milliseconds.
    pub cpu_ms: u64,
}

/// Reads the counters and makes rates of them.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    at: Duration,
    transferred: u64,
    pages: u64,
}

impl Gauge {
    /// Brings `ram` up to date with the channels' counters at `now`.
    pub fn read(&mut self, counters: &Counters, now: Duration, ram: &mut Ram) {
        ram.transferred = counters.transferred.load(Relaxed);
        ram.normal = counters.normal.load(Relaxed);
        ram.duplicate = counters.duplicate.load(Relaxed);
        ram.normal_bytes = ram.normal * PAGE as u64;
        ram.page_size = PAGE as u64;
        let window = now.saturating_sub(self.at);
        if window < WINDOW {
            return;
        }
        let pages = ram.normal + ram.duplicate;
        ram.mbps = (ram.transferred - self.transferred) as f64 * 8.0 / 1e6 / window.as_secs_f64();
        ram.pages_per_second = ((pages - self.pages) as f64 / window.as_secs_f64()) as u64;
        *self = Self { at: now, transferred: ram.transferred, pages };
    }
}

/// As QEMU: rates over at least this time.
const WINDOW: Duration = Duration::from_millis(100);
