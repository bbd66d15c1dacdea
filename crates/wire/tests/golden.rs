//! Bytes that were once on a wire and will be read for ever: headers that QEMU 10.0.2 sent to a listener, those
//! of our first version, and one made by hand after what QEMU 7.2 sends. Messages have theirs beside their code.

use ram::{Block, BlockId, Layout};
use whimbrel_wire::{Arrived, Format, Method, Opening, Packet, Session, WireError, decode};

const QEMU_OPENING: &[u8] = include_bytes!("../golden/opening-qemu-10.0.2.bin");
const QEMU_SYNC: &[u8] = include_bytes!("../golden/packet-qemu-10.0.2-sync.bin");
const QEMU_MIXED: &[u8] = include_bytes!("../golden/packet-qemu-10.0.2-mixed.bin");
const QEMU_ZERO: &[u8] = include_bytes!("../golden/packet-qemu-10.0.2-zero.bin");
const QEMU_NORMAL: &[u8] = include_bytes!("../golden/packet-qemu-10.0.2-normal.bin");
const OLD_STALE: &[u8] = include_bytes!("../golden/packet-by-hand-7.2-stale.bin");
const OUR_OPENING: &[u8] = include_bytes!("../golden/opening-1.bin");
const OUR_PACKET: &[u8] = include_bytes!("../golden/packet-1.bin");

const FORMAT: Format = Format { packet_pages: 128 };

/// The blocks of the q35 with 64 MiB that was recorded, as `info ramblock` listed them.
fn layout() -> Layout {
    let blocks = [
        ("pc.ram", 0x4000000),
        ("0000:00:01.0/vga.vram", 0x1000000),
        ("/rom@etc/acpi/tables", 0x20000),
        ("pc.bios", 0x40000),
        ("pc.rom", 0x20000),
        ("0000:00:01.0/vga.rom", 0x10000),
        ("/rom@etc/table-loader", 0x1000),
        ("/rom@etc/acpi/rsdp", 0x1000),
    ];
    let block = |(name, used_bytes): (&str, u64)| Block { name: name.into(), used_bytes, page_bytes: 4096 };
    Layout::new(blocks.map(block).into()).unwrap()
}

fn read(bytes: &[u8]) -> (Arrived, Vec<u64>, Vec<u64>) {
    let (mut normal, mut zero) = (Vec::new(), Vec::new());
    let arrived = decode(bytes, FORMAT, &layout(), &mut normal, &mut zero).unwrap();
    (arrived, normal, zero)
}

/// The same packet as we would send it.
fn write((arrived, normal, zero): &(Arrived, Vec<u64>, Vec<u64>)) -> Vec<u8> {
    let layout = layout();
    let block = if normal.len() + zero.len() == 0 { "" } else { &layout.block(arrived.block).name };
    let Arrived { sync, method, number, payload_bytes, .. } = *arrived;
    let mut bytes = vec![0; FORMAT.header_bytes()];
    Packet { sync, method, number, payload_bytes, block, normal, zero }.encode(FORMAT, &mut bytes);
    bytes
}

#[test]
fn an_opening_of_qemu_is_read_and_written_alike() {
    let uuid = *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff";
    let opening = Opening { uuid, channel: 1, session: Session([0; 16]) };
    assert_eq!(Opening::decode(QEMU_OPENING, 3), Ok(opening));
    assert_eq!(opening.encode(), QEMU_OPENING);
    assert_eq!(Opening::decode(QEMU_OPENING, 1), Err(WireError::Channel { channel: 1, channels: 1 }));
}

#[test]
fn packets_of_qemu_are_read_and_written_alike() {
    for bytes in [QEMU_SYNC, QEMU_MIXED, QEMU_ZERO] {
        assert_eq!(write(&read(bytes)), bytes);
    }
    // Behind the last page QEMU leaves what was there before.
    let used = 320 + 8;
    assert_eq!(write(&read(QEMU_NORMAL))[..used], QEMU_NORMAL[..used]);
}

#[test]
fn packets_of_qemu_say_what_it_recorded() {
    let arrived = |sync, number, normal, zero, block| {
        let (method, payload_bytes, block) = (Method::None, normal as u32 * 4096, BlockId(block));
        Arrived { sync, method, number, payload_bytes, block, normal, zero }
    };
    assert_eq!(read(QEMU_SYNC).0, arrived(true, 1, 0, 0, 0));
    assert_eq!(read(QEMU_ZERO).0, arrived(false, 10, 0, 128, 0));
    assert_eq!(read(QEMU_NORMAL).0, arrived(false, 168, 1, 0, 7));
    let (mixed, normal, zero) = read(QEMU_MIXED);
    assert_eq!(mixed, arrived(false, 4, 42, 86, 0));
    // QEMU swaps zero pages to the back, so neither list is in order.
    assert_eq!((normal[..3].to_vec(), zero[..2].to_vec()), (vec![0xff, 0xfe, 0xfd], vec![0xab, 0xac]));
}

#[test]
fn a_sync_of_qemu_7_2_with_what_the_packet_before_it_left_is_a_sync() {
    let (arrived, normal, zero) = read(OLD_STALE);
    assert!(arrived.sync && arrived.payload_bytes == 0 && normal.is_empty() && zero.is_empty());
}

#[test]
fn our_first_version_is_read_and_written_alike() {
    let opening = Opening { uuid: [0x5a; 16], channel: 3, session: Session(*b"0123456789abcdef") };
    assert_eq!(Opening::decode(OUR_OPENING, 4), Ok(opening));
    assert_eq!(opening.encode(), OUR_OPENING);
    let packet = read(OUR_PACKET);
    assert_eq!((packet.0.number, &packet.1, &packet.2), (7, &vec![1, 2, 16383], &vec![0, 3]));
    assert_eq!(write(&packet), OUR_PACKET);
}
