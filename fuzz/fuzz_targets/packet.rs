//! Any bytes are a packet whose pages all lie in its block and are in it once, or an error.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ram::{Block, Layout, PAGE};
use std::collections::HashSet;
use std::sync::LazyLock;
use wire::{Format, Packet, decode};

const FORMAT: Format = Format { packet_pages: 128 };

/// Some of the blocks that the golden packets are of.
static LAYOUT: LazyLock<Layout> = LazyLock::new(|| {
    let block = |name: &str, used_bytes: u64| Block { name: name.into(), used_bytes, page_bytes: 4096 };
    Layout::new(vec![
        block("pc.ram", 64 << 20),
        block("pc.rom", 128 << 10),
        block("/rom@etc/acpi/rsdp", 4096),
    ])
    .unwrap()
});

fuzz_target!(|bytes: &[u8]| {
    let (mut normal, mut zero) = (Vec::new(), Vec::new());
    // Filled up or cut to the length of a header, so that no try is lost to a wrong one.
    let mut header = bytes.to_vec();
    header.resize(FORMAT.header_bytes(), 0);
    let Ok(arrived) = decode(&header, FORMAT, &LAYOUT, &mut normal, &mut zero) else { return };
    assert_eq!((normal.len(), zero.len()), (arrived.normal, arrived.zero));
    assert!(
        normal.capacity() <= 256 && zero.capacity() <= 256,
        "{} and {}",
        normal.capacity(),
        zero.capacity()
    );
    assert_eq!(arrived.payload_bytes as usize, arrived.normal * PAGE);
    let pages: HashSet<&u64> = normal.iter().chain(&zero).collect();
    assert_eq!(pages.len(), arrived.normal + arrived.zero);
    let block = LAYOUT.block(arrived.block);
    assert!(pages.into_iter().all(|&page| page < block.pages()));

    let (sync, method, number, payload_bytes) =
        (arrived.sync, arrived.method, arrived.number, arrived.payload_bytes);
    let packet =
        Packet { sync, method, number, payload_bytes, block: &block.name, normal: &normal, zero: &zero };
    packet.encode(FORMAT, &mut header);
    let (mut normal_again, mut zero_again) = (Vec::new(), Vec::new());
    assert_eq!(decode(&header, FORMAT, &LAYOUT, &mut normal_again, &mut zero_again), Ok(arrived));
    assert_eq!((normal_again, zero_again), (normal, zero));
});
