//! What the channels of a migration need of a connection. The real one is [`Stream`](crate::Stream); the
//! simulator has its own.

use ram::{Span, SpanMut};
use std::io;

/// A connection that carries runs of bytes, whole or not at all.
pub trait Transport: Send {
    /// Sends all bytes of `spans` in their order. After an error an unknown part of them is sent, and the
    /// connection is of no more use.
    fn send(&mut self, spans: &[Span<'_>]) -> io::Result<()>;

    /// Fills all of `spans` in their order. The end of the stream before that is `UnexpectedEof`; after any error
    /// the spans hold anything and the connection is of no more use.
    fn receive(&mut self, spans: &mut [SpanMut<'_>]) -> io::Result<()>;

    /// Sends bytes of our own.
    fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.send(&[bytes.into()])
    }

    /// Fills a buffer of our own.
    fn receive_bytes(&mut self, into: &mut [u8]) -> io::Result<()> {
        self.receive(&mut [into.into()])
    }
}
