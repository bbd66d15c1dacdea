//! Messages over a connection. Knows how they are cut, not in which order they make sense.

use crate::Transport;
use std::io;
use wire::{CONTROL_GREETING, FRAME_BYTES, Frame, Message, WireError};

/// One end of a control connection, or one direction of it if two share its stream.
#[derive(Debug)]
pub struct Control<T> {
    transport: T,
    bytes: Vec<u8>,
}

impl<T: Transport> Control<T> {
    /// For the end that was dialled, once the greeting has been read; and for a second hand on either end.
    pub fn new(transport: T) -> Self {
        Self { transport, bytes: Vec::new() }
    }

    /// For the end that dialled: sends the greeting.
    pub fn dial(mut transport: T) -> Result<Self, ControlError> {
        transport.send_bytes(&CONTROL_GREETING).map_err(ControlError::Send)?;
        Ok(Self::new(transport))
    }

    /// Sends a message. A device state that is too long is an error before anything is sent.
    pub fn send(&mut self, message: &Message) -> Result<(), ControlError> {
        self.bytes.clear();
        message.encode(&mut self.bytes)?;
        self.transport.send_bytes(&self.bytes).map_err(ControlError::Send)
    }

    /// Waits for the next message. Memory is taken as bytes arrive, not as they are announced.
    pub fn receive(&mut self) -> Result<Message, ControlError> {
        let mut head = [0; FRAME_BYTES];
        self.transport.receive_bytes(&mut head).map_err(ControlError::Receive)?;
        let frame = Frame::decode(&head)?;
        let mut payload = Vec::new();
        while payload.len() < frame.bytes {
            let done = payload.len();
            payload.resize(frame.bytes.min(done + PIECE_BYTES), 0);
            self.transport.receive_bytes(&mut payload[done..]).map_err(ControlError::Receive)?;
        }
        Ok(Message::decode(frame.kind, payload)?)
    }

    /// The connection.
    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// The connection, for its time limits and for bytes that are encoded already.
    pub fn transport_mut(&mut self) -> &mut T {
        &mut self.transport
    }
}

/// Why a message did not get through.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ControlError {
    #[error("the control connection takes no more messages")]
    Send(#[source] io::Error),
    #[error("the control connection brings no more messages")]
    Receive(#[source] io::Error),
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// The most memory that a peer gets for a length alone.
const PIECE_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use ram::{Span, SpanMut};
    use std::collections::VecDeque;

    /// Hands back what it was sent, and keeps account of the largest piece that was asked for.
    #[derive(Default)]
    struct Loop {
        bytes: VecDeque<u8>,
        piece_bytes_max: usize,
    }

    impl Transport for Loop {
        fn send(&mut self, spans: &[Span<'_>]) -> io::Result<()> {
            for span in spans {
                let mut bytes = vec![0; span.len()];
                span.copy_to(&mut bytes);
                self.bytes.extend(bytes);
            }
            Ok(())
        }

        fn receive(&mut self, _: &mut [SpanMut<'_>]) -> io::Result<()> {
            unreachable!("control messages go into buffers of our own")
        }

        fn receive_bytes(&mut self, into: &mut [u8]) -> io::Result<()> {
            self.piece_bytes_max = self.piece_bytes_max.max(into.len());
            for byte in into {
                *byte = self.bytes.pop_front().ok_or(io::ErrorKind::UnexpectedEof)?;
            }
            Ok(())
        }
    }

    #[test]
    fn messages_come_out_as_they_went_in() {
        let mut control = Control::dial(Loop::default()).unwrap();
        let sent = [
            Message::Alive,
            Message::Device(vec![7; 1 << 20]),
            Message::Finish { sync: 3 },
            Message::Device(vec![]),
        ];
        sent.iter().for_each(|message| control.send(message).unwrap());
        let mut greeting = [0; 8];
        control.transport_mut().receive_bytes(&mut greeting).unwrap();
        assert_eq!(greeting, CONTROL_GREETING);
        for message in sent {
            assert_eq!(control.receive().unwrap(), message);
        }
        assert!(matches!(control.receive(), Err(ControlError::Receive(_))));
    }

    #[test]
    fn a_length_alone_gets_a_peer_no_memory() {
        let mut control = Control::new(Loop::default());
        control.transport_mut().send_bytes(&[0, 0, 0, 5, 4, 0, 0, 0]).unwrap();
        assert!(matches!(control.receive(), Err(ControlError::Receive(_))));
        assert!(control.transport().piece_bytes_max <= 1 << 20);
        control.transport_mut().send_bytes(&[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]).unwrap();
        assert!(matches!(control.receive(), Err(ControlError::Wire(WireError::TooLong { .. }))));
    }
}
