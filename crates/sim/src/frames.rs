//! Whether an actor that would wait for bytes can be stepped: what it is about to read has arrived whole, or will
//! never come.

use crate::net::{Net, WireId};
use crate::{End, Shared};
use ram::Layout;
use wire::{FRAME_BYTES, Format, Frame};

/// Whether a message has arrived at this end, or nothing more will.
pub(crate) fn is_ready(net: &Shared<Net>, wire: WireId, end: End) -> bool {
    let net = net.lock().expect("no holder panics");
    let (bytes, ended) = net.arrived(wire, end);
    let mut head = [0; FRAME_BYTES];
    if bytes.len() < FRAME_BYTES {
        return ended;
    }
    head.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    // One that makes no sense is refused as soon as it is seen.
    ended || Frame::decode(&head).map_or(true, |frame| bytes.len() >= FRAME_BYTES + frame.bytes)
}

/// Whether so many bytes have arrived at this end, or nothing more will.
pub(crate) fn has(net: &Shared<Net>, wire: WireId, end: End, count: usize) -> bool {
    let net = net.lock().expect("no holder panics");
    let (bytes, ended) = net.arrived(wire, end);
    bytes.len() >= count || ended
}

/// Looks for whole packets. Its buffers are used again.
#[derive(Debug, Default)]
pub(crate) struct PacketEye {
    header: Vec<u8>,
    normal: Vec<u64>,
    zero: Vec<u64>,
}

impl PacketEye {
    /// Whether a packet has arrived at the target, or nothing more will.
    pub(crate) fn sees(&mut self, net: &Shared<Net>, wire: WireId, format: Format, layout: &Layout) -> bool {
        let net = net.lock().expect("no holder panics");
        let (bytes, ended) = net.arrived(wire, End::Target);
        if ended || bytes.len() < format.header_bytes() {
            return ended;
        }
        self.header.clear();
        self.header.extend(bytes.iter().take(format.header_bytes()));
        match wire::decode(&self.header, format, layout, &mut self.normal, &mut self.zero) {
            Ok(packet) => bytes.len() >= format.header_bytes() + packet.payload_bytes as usize,
            Err(_) => true,
        }
    }
}
