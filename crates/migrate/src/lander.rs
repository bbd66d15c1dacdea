//! A channel at the target: receives a packet and puts its pages in place. Every byte of it may be hostile.

use crate::sweep::Sweep;
use crate::vm::TargetRam;
use crate::{Counters, Landing, Trouble};
use channel::Transport;
use ram::{Batch, Land, Layout, Run, SpanMut, Window};
use std::io::ErrorKind;
use std::sync::Arc;
use wire::{Arrived, Format};

/// One channel's receiving end. Its buffers are allocated once.
#[derive(Debug)]
pub struct Lander<T> {
    transport: T,
    layout: Arc<Layout>,
    format: Format,
    landing: Arc<Landing>,
    counters: Arc<Counters>,
    window: Window,
    header: Vec<u8>,
    batch: Batch,
    zero: Vec<u64>,
    sweep: Sweep,
    to_clear: Vec<Run>,
    data: Vec<Run>,
    spans: Vec<SpanMut<'static>>,
    syncs: u64,
}

/// What has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landed {
    /// Pages, now in place.
    Pages,
    /// The n-th sync point of this channel: wait at the [`Gate`](crate::Gate).
    Sync(u64),
    /// The other end has closed the channel between two packets.
    End,
}

impl<T: Transport> Lander<T> {
    /// A lander on a transport whose opening has been read. `layout` is the target's own.
    pub fn new(
        transport: T,
        layout: Arc<Layout>,
        format: Format,
        landing: Arc<Landing>,
        counters: Arc<Counters>,
    ) -> Self {
        let pages = format.packet_pages as usize;
        Self {
            transport,
            layout,
            format,
            sweep: landing.sweep(),
            landing,
            counters,
            window: Window::new(pages),
            header: vec![0; format.header_bytes()],
            batch: Batch::with_room(pages),
            zero: Vec::with_capacity(pages),
            to_clear: Vec::with_capacity(pages),
            data: Vec::with_capacity(pages),
            spans: Vec::with_capacity(pages),
            syncs: 0,
        }
    }

    /// Receives one packet and puts its pages in place.
    pub fn step<L: TargetRam + ?Sized>(&mut self, ram: &L) -> Result<Landed, Trouble> {
        if !self.receive_header()? {
            return Ok(Landed::End);
        }
        let packet =
            wire::decode(&self.header, self.format, &self.layout, &mut self.batch.pages, &mut self.zero)?;
        if packet.normal > 0 {
            self.batch.block = packet.block;
            self.receive_pages(ram)?;
        }
        if packet.zero > 0 {
            self.clear_pages(ram, &packet)?;
        }
        self.counters.add(self.header.len() + packet.payload_bytes as usize, packet.normal, packet.zero);
        if packet.sync {
            self.syncs += 1;
            return Ok(Landed::Sync(self.syncs));
        }
        Ok(Landed::Pages)
    }

    /// False if the channel was closed before the first byte.
    fn receive_header(&mut self) -> Result<bool, Trouble> {
        let (first, rest) = self.header.split_at_mut(1);
        match self.transport.receive(&mut [SpanMut::from(first)]) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(false),
            other => other?,
        }
        self.transport.receive(&mut [SpanMut::from(rest)])?;
        Ok(true)
    }

    fn receive_pages<L: Land + ?Sized>(&mut self, ram: &L) -> Result<(), Trouble> {
        self.landing.fill(self.batch.block, &self.batch.pages);
        let mut spans = recycle(std::mem::take(&mut self.spans));
        self.window.open(ram, &self.batch)?.gather(&mut spans);
        self.transport.receive(&mut spans)?;
        self.spans = recycle(spans);
        self.window.settle(ram, &self.batch)?;
        Ok(())
    }

    fn clear_pages<L: TargetRam + ?Sized>(&mut self, ram: &L, packet: &Arrived) -> Result<(), Trouble> {
        self.to_clear.clear();
        self.landing.empty(packet.block, &self.zero, &mut self.to_clear);
        if self.to_clear.is_empty() {
            return Ok(());
        }
        self.data.clear();
        let pages = self.to_clear.iter().flat_map(|run| run.first..run.end());
        self.sweep.find(ram, packet.block, pages, &mut self.data)?;
        self.data.iter().try_for_each(|run| ram.zero(packet.block, *run))?;
        Ok(())
    }
}

/// The vector, emptied, for spans of another borrow; collecting in place keeps its memory.
fn recycle<'a>(mut spans: Vec<SpanMut<'_>>) -> Vec<SpanMut<'a>> {
    spans.clear();
    spans.into_iter().map(|_| unreachable!("the vector is empty")).collect()
}
