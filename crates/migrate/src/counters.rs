//! What the channels have done, counted as they do it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts that every channel adds to. QEMU's words: `duplicate` pages are zero pages, `normal` ones carry data.
#[derive(Debug, Default)]
pub struct Counters {
    /// Bytes on the wire, headers included.
    pub transferred: AtomicU64,
    /// Pages announced as zero.
    pub duplicate: AtomicU64,
    /// Pages sent in full.
    pub normal: AtomicU64,
    /// Packets, sync points included; also the number of the next packet.
    pub packets: AtomicU64,
}

impl Counters {
    /// Counts a packet.
    pub(crate) fn add(&self, bytes: usize, normal: usize, duplicate: usize) {
        self.transferred.fetch_add(bytes as u64, Relaxed);
        self.normal.fetch_add(normal as u64, Relaxed);
        self.duplicate.fetch_add(duplicate as u64, Relaxed);
    }

    /// Pages sent in full so far.
    pub fn normal_pages(&self) -> u64 {
        self.normal.load(Relaxed)
    }
}
