//! Packets of a page channel in QEMU's multifd format: a header that names the pages, then their bytes. Holds
//! the header; knows nothing of what is in the payload.

use crate::method::METHOD_MASK;
use crate::{Method, WireError, shown};
use ram::{Block, BlockId, Layout, PAGE};

/// What both ends agree on before the first packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// Pages that a packet has room for.
    pub packet_pages: u32,
}

impl Format {
    /// The format with packets of up to `packet_bytes` bytes of pages: 4096 times a power of two, at most 8 MiB.
    pub fn new(packet_bytes: u32) -> Result<Self, WireError> {
        let fits = (PAGE as u32..=PACKET_BYTES_MAX).contains(&packet_bytes);
        if !fits || !packet_bytes.is_power_of_two() {
            return Err(WireError::PacketBytes { bytes: packet_bytes });
        }
        Ok(Self { packet_pages: packet_bytes / PAGE as u32 })
    }

    /// Bytes of every header, however many pages it names: 1344 for QEMU's 128 pages.
    pub fn header_bytes(self) -> usize {
        OFFSETS_AT + 8 * self.packet_pages as usize
    }
}

/// A packet to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Ends a round: the target waits for this on all channels before it reads on.
    pub sync: bool,
    /// How the payload is compressed.
    pub method: Method,
    /// Counts the packets of all channels from 0.
    pub number: u64,
    /// Bytes that follow the header.
    pub payload_bytes: u32,
    /// The block all pages are of; empty without pages.
    pub block: &'a str,
    /// Indices of the pages in the payload, in its order.
    pub normal: &'a [u64],
    /// Indices of the pages that are all zero.
    pub zero: &'a [u64],
}

impl Packet<'_> {
    /// Writes the header over all of `into`, which must be [`Format::header_bytes`] long. Panics if the pages or
    /// the name of the block don't fit, which is for the caller to see to.
    pub fn encode(&self, format: Format, into: &mut [u8]) {
        let (normal, zero) = (self.normal.len(), self.zero.len());
        assert!(normal + zero <= format.packet_pages as usize, "{normal} + {zero} pages in {format:?}");
        assert!(self.block.len() < NAME_BYTES, "name of {} bytes", self.block.len());
        // QEMU 9.0 and newer leave a packet without pages all zero from here on, and so do we.
        let allocated = if normal + zero == 0 { 0 } else { format.packet_pages };
        let flags = self.method.flags() | if self.sync { SYNC } else { 0 };
        into.fill(0);
        for (at, value) in [
            (0, PAGE_MAGIC),
            (4, VERSION),
            (8, flags),
            (12, allocated),
            (16, normal as u32),
            (20, self.payload_bytes),
            (32, zero as u32),
        ] {
            into[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        into[24..32].copy_from_slice(&self.number.to_be_bytes());
        into[NAME_AT..NAME_AT + self.block.len()].copy_from_slice(self.block.as_bytes());
        let (offsets, _) = into[OFFSETS_AT..].as_chunks_mut();
        for (offset, page) in offsets.iter_mut().zip(self.normal.iter().chain(self.zero)) {
            *offset = (page * PAGE as u64).to_be_bytes();
        }
    }
}

/// A header that came in and was found sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Ends a round on this channel, after the pages of this packet.
    pub sync: bool,
    /// How the payload is compressed.
    pub method: Method,
    /// The sender's count; nothing hangs on it, QEMU 7.2 repeats some.
    pub number: u64,
    /// Bytes that follow the header; none without normal pages.
    pub payload_bytes: u32,
    /// The block all pages are of. Block 0, and of no meaning, without pages.
    pub block: BlockId,
    /// How many pages are in the payload.
    pub normal: usize,
    /// How many pages are zero.
    pub zero: usize,
}

/// Reads a header. Fills `normal` and `zero` with page indices that lie inside the block, each at most once over
/// both; they are reused, not grown beyond the room of a packet. Fails on anything that is not a sound packet.
pub fn decode(
    bytes: &[u8],
    format: Format,
    layout: &Layout,
    normal: &mut Vec<u64>,
    zero: &mut Vec<u64>,
) -> Result<Arrived, WireError> {
    normal.clear();
    zero.clear();
    let head = Head::decode(bytes, format)?;
    let mut arrived = Arrived {
        sync: head.sync,
        method: head.method,
        number: head.number,
        payload_bytes: head.payload_bytes,
        block: BlockId(0),
        normal: head.normal,
        zero: head.zero,
    };
    if head.normal + head.zero == 0 {
        return Ok(arrived);
    }
    arrived.block = find_block(bytes, layout)?;
    let block = layout.block(arrived.block);
    let (offsets, _) = bytes[OFFSETS_AT..].as_chunks();
    let (normals, rest) = offsets.split_at(head.normal);
    let zeros = &rest[..head.zero];
    // The room of `zero` serves to look for doubles before it takes its own pages.
    read_pages(normals, block, normal)?;
    read_pages(zeros, block, zero)?;
    if !apart(normal, zero) {
        zero.extend_from_slice(normal);
        check_once(zero, block)?;
        zero.clear();
        read_pages(zeros, block, zero)?;
    }
    Ok(arrived)
}

/// What a header says before its block and offsets.
struct Head {
    sync: bool,
    method: Method,
    number: u64,
    payload_bytes: u32,
    normal: usize,
    zero: usize,
}

impl Head {
    fn decode(bytes: &[u8], format: Format) -> Result<Self, WireError> {
        let (what, wanted) = ("packet", format.header_bytes());
        if bytes.len() != wanted {
            return Err(WireError::Length { what, bytes: bytes.len(), wanted });
        }
        let [magic, version, flags, allocated, normal, payload] =
            [0, 4, 8, 12, 16, 20].map(|at| be32(bytes, at));
        let zero = be32(bytes, 32);
        if magic != PAGE_MAGIC {
            return Err(WireError::Magic { what, magic, wanted: PAGE_MAGIC });
        }
        if version != VERSION {
            return Err(WireError::Version { what, version, wanted: VERSION });
        }
        if flags & !(SYNC | METHOD_MASK) != 0 {
            return Err(WireError::Flags { flags });
        }
        let method = Method::from_flags(flags & METHOD_MASK)?;
        if allocated > format.packet_pages {
            return Err(WireError::Room { allocated, pages_max: format.packet_pages });
        }
        if u64::from(normal) + u64::from(zero) > u64::from(allocated) {
            return Err(WireError::Counts { normal, zero, allocated });
        }
        // Up to QEMU 7.2 a packet without pages repeats the size of the one before it.
        let payload_bytes = if normal == 0 { 0 } else { payload };
        let wanted = method.payload_bytes(normal as usize);
        if u64::from(payload_bytes) != wanted {
            return Err(WireError::Payload { bytes: payload_bytes, normal, wanted });
        }
        let number = u64::from(be32(bytes, 24)) << 32 | u64::from(be32(bytes, 28));
        let (normal, zero) = (normal as usize, zero as usize);
        Ok(Self { sync: flags & SYNC != 0, method, number, payload_bytes, normal, zero })
    }
}

/// The block whose name the header has. Like QEMU, takes the last byte of the field for a NUL whatever it is.
fn find_block(bytes: &[u8], layout: &Layout) -> Result<BlockId, WireError> {
    let field = &bytes[NAME_AT..NAME_AT + NAME_BYTES - 1];
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let found = str::from_utf8(&field[..end]).ok().and_then(|name| layout.find(name));
    found.ok_or_else(|| WireError::Block { name: shown(&String::from_utf8_lossy(&field[..end])) })
}

/// Appends the pages at `offsets`, all of which must be pages of `block`.
fn read_pages(offsets: &[[u8; 8]], block: &Block, pages: &mut Vec<u64>) -> Result<(), WireError> {
    for offset in offsets.iter().copied().map(u64::from_be_bytes) {
        if !offset.is_multiple_of(PAGE as u64) {
            return Err(WireError::Unaligned { block: block.name.clone(), offset });
        }
        if offset >= block.used_bytes {
            return Err(WireError::Outside { block: block.name.clone(), offset, bytes: block.used_bytes });
        }
        pages.push(offset / PAGE as u64);
    }
    Ok(())
}

/// Whether no page is in twice, seen in one walk. False also when the order does not allow to tell: we send
/// pages in ascending order, QEMU may not.
fn apart(normal: &[u64], zero: &[u64]) -> bool {
    let ascending = |pages: &[u64]| pages.is_sorted_by(|one, next| one < next);
    if !ascending(normal) || !ascending(zero) {
        return false;
    }
    let mut zeros = zero.iter().peekable();
    normal.iter().all(|page| {
        while zeros.next_if(|zero| *zero < page).is_some() {}
        zeros.peek() != Some(&page)
    })
}

/// Sorts `pages` and fails on one that is in twice.
fn check_once(pages: &mut [u64], block: &Block) -> Result<(), WireError> {
    pages.sort_unstable();
    match pages.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(WireError::Twice { block: block.name.clone(), page: pair[0] }),
        None => Ok(()),
    }
}

/// The big-endian number at a place that is inside `bytes`.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// First bytes of an opening and of every packet (QEMU, migration/multifd.c).
pub const PAGE_MAGIC: u32 = 0x1122_3344;

/// Version of openings and packets; the only one QEMU ever had.
pub(crate) const VERSION: u32 = 1;

/// Flag of a packet that ends a round.
const SYNC: u32 = 0x01;

/// Where the name of the block is, in how many bytes, and where the page offsets start.
const NAME_AT: usize = 64;
const NAME_BYTES: usize = 256;
const OFFSETS_AT: usize = NAME_AT + NAME_BYTES;

/// 2048 pages: the header of such a packet has 16 KiB, its pages still fit an L2 cache of today.
const PACKET_BYTES_MAX: u32 = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::{Index, subsequence};

    const FORMAT: Format = Format { packet_pages: 128 };
    const PAGES: u64 = 200;

    fn layout() -> Layout {
        let block =
            |name: &str, pages: u64| Block { name: name.into(), used_bytes: pages * 4096, page_bytes: 4096 };
        Layout::new(vec![block("pc.ram", PAGES), block("/rom@etc/acpi/rsdp", 1)]).unwrap()
    }

    fn packet<'a>(normal: &'a [u64], zero: &'a [u64]) -> Packet<'a> {
        let payload_bytes = (normal.len() * PAGE) as u32;
        Packet { sync: false, method: Method::None, number: 7, payload_bytes, block: "pc.ram", normal, zero }
    }

    fn bytes(packet: Packet<'_>) -> Vec<u8> {
        let mut bytes = vec![0xee; FORMAT.header_bytes()];
        packet.encode(FORMAT, &mut bytes);
        bytes
    }

    fn decoded(bytes: &[u8]) -> Result<(Arrived, Vec<u64>, Vec<u64>), WireError> {
        let (mut normal, mut zero) = (vec![99], vec![99]);
        let arrived = decode(bytes, FORMAT, &layout(), &mut normal, &mut zero)?;
        Ok((arrived, normal, zero))
    }

    fn refused(bytes: &[u8]) -> WireError {
        decoded(bytes).expect_err("an unsound packet")
    }

    fn with(mut bytes: Vec<u8>, at: usize, value: u32) -> Vec<u8> {
        bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
        bytes
    }

    #[test]
    fn packet_sizes_are_powers_of_two_up_to_8_mib() {
        assert_eq!(Format::new(512 << 10), Ok(FORMAT));
        assert_eq!(FORMAT.header_bytes(), 1344);
        assert_eq!(Format::new(8 << 20).map(Format::header_bytes), Ok(320 + 8 * 2048));
        for bytes in [0, 1, 2048, 4097, 12288, 16 << 20, u32::MAX] {
            assert_eq!(Format::new(bytes), Err(WireError::PacketBytes { bytes }));
        }
    }

    proptest! {
        #[test]
        fn a_packet_reads_back_in_any_order_of_pages(
            pages in subsequence((0..PAGES).collect::<Vec<_>>(), 0..=128).prop_shuffle(),
            cut: Index,
            ascending: bool,
            sync: bool,
            number: u64,
        ) {
            let (mut normal, mut zero) = (pages.clone(), Vec::new());
            zero.extend(normal.drain(cut.index(pages.len() + 1)..));
            if ascending {
                normal.sort();
                zero.sort();
            }
            let sent = Packet { sync, number, ..packet(&normal, &zero) };
            let (arrived, normal_in, zero_in) = decoded(&bytes(sent)).unwrap();
            prop_assert_eq!((normal_in, zero_in), (normal.clone(), zero.clone()));
            let block = BlockId(0);
            let (normal, zero) = (normal.len(), zero.len());
            let wanted =
                Arrived { sync, method: Method::None, number, payload_bytes: (normal * PAGE) as u32, block, normal, zero };
            prop_assert_eq!(arrived, wanted);
        }

        #[test]
        fn a_page_that_is_in_twice_is_refused_wherever_it_is(
            pages in subsequence((0..PAGES).collect::<Vec<_>>(), 1..=127).prop_shuffle(),
            which: Index,
            to: Index,
            cut: Index,
            ascending: bool,
        ) {
            let page = *which.get(&pages);
            let mut doubled = pages;
            doubled.insert(to.index(doubled.len() + 1), page);
            let cut = cut.index(doubled.len() + 1);
            let (normal, zero) = doubled.split_at_mut(cut);
            if ascending {
                normal.sort();
                zero.sort();
            }
            let error = refused(&bytes(packet(normal, zero)));
            prop_assert_eq!(error, WireError::Twice { block: "pc.ram".into(), page });
        }

        #[test]
        fn a_changed_packet_is_refused_or_stays_inside_its_block(
            changes in prop::collection::vec((0usize..1344, any::<u8>()), 1..8),
            packet_pages in prop::sample::select(vec![1u32, 64, 128, 2048]),
        ) {
            let mut changed = bytes(packet(&[3, 1], &[0, 199]));
            changes.into_iter().for_each(|(at, byte)| changed[at] = byte);
            changed.resize(Format { packet_pages }.header_bytes(), 0);
            let (mut normal, mut zero, layout) = (Vec::new(), Vec::new(), layout());
            if let Ok(arrived) = decode(&changed, Format { packet_pages }, &layout, &mut normal, &mut zero) {
                prop_assert_eq!((normal.len(), zero.len()), (arrived.normal, arrived.zero));
                prop_assert!(normal.len() + zero.len() <= packet_pages as usize);
                let pages = layout.block(arrived.block).pages();
                prop_assert!(normal.iter().chain(&zero).all(|&page| page < pages));
            }
        }
    }

    #[test]
    fn a_sync_without_pages_is_what_qemu_sends() {
        let sync = Packet { sync: true, block: "", ..packet(&[], &[]) };
        let bytes = bytes(sync);
        assert_eq!(bytes[..12], [0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1, 0, 0, 0, 1]);
        let used: Vec<usize> = (12..1344).filter(|&at| bytes[at] != 0).collect();
        assert_eq!(used, [31], "the packet number and nothing else");
        assert!(decoded(&bytes).unwrap().0.sync);
    }

    #[test]
    fn a_stale_size_block_and_offset_without_pages_are_looked_over() {
        // QEMU 7.2 leaves them from the packet before.
        let bytes = with(bytes(Packet { block: "gone", ..packet(&[], &[]) }), 20, 524288);
        let (arrived, ..) = decoded(&with(bytes, OFFSETS_AT, u32::MAX)).unwrap();
        assert_eq!((arrived.payload_bytes, arrived.normal, arrived.zero), (0, 0, 0));
    }

    #[test]
    fn each_field_that_lies_is_named() {
        let sound = || bytes(packet(&[5], &[6]));
        assert!(matches!(refused(&sound()[1..]), WireError::Length { bytes: 1343, wanted: 1344, .. }));
        assert!(matches!(refused(&with(sound(), 0, 0x5145564d)), WireError::Magic { magic: 0x5145564d, .. }));
        assert!(matches!(refused(&with(sound(), 4, 2)), WireError::Version { version: 2, .. }));
        assert_eq!(refused(&with(sound(), 8, 0x40)), WireError::Flags { flags: 0x40 });
        assert_eq!(refused(&with(sound(), 8, 0x21)), WireError::Method { method: "qatzip" });
        assert_eq!(refused(&with(sound(), 8, 0x06)), WireError::Methods { flags: 6 });
        assert_eq!(refused(&with(sound(), 12, 129)), WireError::Room { allocated: 129, pages_max: 128 });
        let counts = WireError::Counts { normal: u32::MAX, zero: 1, allocated: 128 };
        assert_eq!(refused(&with(sound(), 16, u32::MAX)), counts);
        assert_eq!(refused(&with(sound(), 12, 1)), WireError::Counts { normal: 1, zero: 1, allocated: 1 });
        let payload = WireError::Payload { bytes: 4097, normal: 1, wanted: 4096 };
        assert_eq!(refused(&with(sound(), 20, 4097)), payload);
        let block = "pc.ram".to_owned();
        let unaligned = WireError::Unaligned { block: block.clone(), offset: 0x5001 };
        assert_eq!(refused(&with(sound(), OFFSETS_AT + 4, 0x5001)), unaligned);
        let outside = WireError::Outside { block, offset: PAGES * 4096, bytes: PAGES * 4096 };
        assert_eq!(refused(&with(sound(), OFFSETS_AT + 12, PAGES as u32 * 4096)), outside);
    }

    #[test]
    fn an_unknown_block_is_named_without_its_escape_sequences() {
        let named = |name| refused(&bytes(Packet { block: name, ..packet(&[0], &[]) }));
        assert_eq!(named("pc.ra\x1b[2J"), WireError::Block { name: "pc.ra[2J".into() });
        let mut full = bytes(packet(&[0], &[]));
        full[NAME_AT..OFFSETS_AT].fill(0xff);
        assert!(matches!(refused(&full), WireError::Block { name } if name.chars().count() == 255));
    }

    #[test]
    #[should_panic(expected = "128 + 1 pages")]
    fn more_pages_than_fit_are_a_broken_promise() {
        let pages: Vec<u64> = (0..128).collect();
        bytes(packet(&pages, &[128]));
    }
}
