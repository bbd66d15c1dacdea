//! A channel at the source: reads the pages of a parcel, finds the zero ones, and sends them as a packet.

use crate::{Counters, Kind, Parcel, Trouble};
use channel::{Limiter, Transport};
use ram::{Layout, Pages, Reach, Span, Window};
use scan::Kernel;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;
use wire::{Format, Method, Packet};

/// What the senders of a migration have in common.
#[derive(Clone, Debug)]
pub struct SenderParts {
    /// The blocks that both ends agreed on.
    pub layout: Arc<Layout>,
    /// The packets that both ends agreed on.
    pub format: Format,
    /// Looks for zero pages.
    pub kernel: Kernel,
    /// `multifd-normal-page-ratio`: percent of the zero pages that are sent in full all the same. A test aid.
    pub normal_page_ratio: u8,
    /// What all channels together may send.
    pub limiter: Arc<Limiter>,
    /// What all channels have done.
    pub counters: Arc<Counters>,
}

/// One channel's sending end. Its buffers are allocated once.
#[derive(Debug)]
pub struct Sender<T> {
    parts: SenderParts,
    transport: T,
    window: Window,
    header: Vec<u8>,
    sorted: Sorted,
    spans: Vec<Span<'static>>,
}

/// The pages of a parcel by what travels: all of a page, or the word that it is zero.
#[derive(Debug, Default)]
struct Sorted {
    normal: Vec<u64>,
    /// Where in the parcel each normal page is.
    places: Vec<usize>,
    zero: Vec<u64>,
}

impl<T: Transport> Sender<T> {
    /// A sender on a transport that has sent its opening.
    pub fn new(parts: SenderParts, transport: T) -> Self {
        let pages = parts.format.packet_pages as usize;
        Self {
            transport,
            window: Window::new(pages),
            header: vec![0; parts.format.header_bytes()],
            sorted: Sorted::with_room(pages),
            spans: Vec::with_capacity(pages + 1),
            parts,
        }
    }

    /// Sends the pages of a parcel as they are now.
    pub fn step<R: Reach + ?Sized>(&mut self, ram: &R, parcel: &Parcel) -> Result<(), Trouble> {
        let Self { parts, transport, window, header, sorted, spans } = self;
        sorted.clear();
        let mut gathered = recycle(std::mem::take(spans));
        if parcel.kind == Kind::Zero {
            sorted.zero.extend(&parcel.batch.pages);
            gathered.push(parts.header(sorted, parcel, header));
        } else {
            let pages = window.load(ram, &parcel.batch)?;
            parts.sort(pages, parcel, sorted);
            gathered.push(parts.header(sorted, parcel, header));
            pages.gather(sorted.places.iter().copied(), &mut gathered);
        }
        parts.send(transport, &gathered, sorted)?;
        *spans = recycle(gathered);
        Ok(())
    }

    /// Sends a sync point: what was sent before is in place at the target before anything sent after it.
    pub fn sync(&mut self) -> Result<(), Trouble> {
        let number = self.parts.counters.packets.fetch_add(1, Relaxed);
        let packet = Packet {
            sync: true,
            method: Method::None,
            number,
            payload_bytes: 0,
            block: "",
            normal: &[],
            zero: &[],
        };
        packet.encode(self.parts.format, &mut self.header);
        self.transport.send(&[Span::from(&self.header[..])])?;
        self.parts.counters.add(self.header.len(), 0, 0);
        Ok(())
    }
}

impl SenderParts {
    fn sort(&self, pages: Pages<'_>, parcel: &Parcel, sorted: &mut Sorted) {
        for (place, &page) in parcel.batch.pages.iter().enumerate() {
            if parcel.kind == Kind::Check && self.goes_as_zero(pages.page(place), page) {
                sorted.zero.push(page);
            } else {
                sorted.normal.push(page);
                sorted.places.push(place);
            }
        }
    }

    fn goes_as_zero(&self, span: Span<'_>, page: u64) -> bool {
        self.kernel.is_zero(span) && page % 100 >= u64::from(self.normal_page_ratio)
    }

    fn header<'a>(&self, sorted: &Sorted, parcel: &Parcel, into: &'a mut [u8]) -> Span<'a> {
        let packet = Packet {
            sync: false,
            method: Method::None,
            number: self.counters.packets.fetch_add(1, Relaxed),
            payload_bytes: (sorted.normal.len() * ram::PAGE) as u32,
            block: &self.layout.block(parcel.batch.block).name,
            normal: &sorted.normal,
            zero: &sorted.zero,
        };
        packet.encode(self.format, into);
        Span::from(&*into)
    }

    fn send<T: Transport>(
        &self,
        transport: &mut T,
        spans: &[Span<'_>],
        sorted: &Sorted,
    ) -> Result<(), Trouble> {
        let bytes = spans.iter().map(|span| span.len()).sum();
        let pause = self.limiter.take(bytes, Instant::now());
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        transport.send(spans)?;
        self.counters.add(bytes, sorted.normal.len(), sorted.zero.len());
        Ok(())
    }
}

impl Sorted {
    fn with_room(pages: usize) -> Self {
        let room = || Vec::with_capacity(pages);
        Self { normal: room(), places: Vec::with_capacity(pages), zero: room() }
    }

    fn clear(&mut self) {
        self.normal.clear();
        self.places.clear();
        self.zero.clear();
    }
}

/// The vector, emptied, for spans of another borrow; collecting in place keeps its memory.
fn recycle<'a>(mut spans: Vec<Span<'_>>) -> Vec<Span<'a>> {
    spans.clear();
    spans.into_iter().map(|_| unreachable!("the vector is empty")).collect()
}
