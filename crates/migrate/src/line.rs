//! The control connection with its two threads, alike at both ends: one reads what comes into the inbox, the
//! other says several times a second that this end is alive.

use crate::collector::{Commit, Post};
use crate::{CommitLine, Inbox, Note, Trouble, told};
use channel::{Control, Stream, Transport};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use wire::Message;

/// This end of the control connection.
pub(crate) struct Line {
    writer: Arc<Mutex<Control<Stream>>>,
    stream: Stream,
}

impl Line {
    /// A line over a connection whose greeting is done.
    pub fn new(control: Control<Stream>, stream: Stream) -> Self {
        Self { writer: Arc::new(Mutex::new(control)), stream }
    }

    /// Writes messages.
    pub fn post(&self) -> Post {
        let writer = self.writer.clone();
        Box::new(move |message| Ok(writer.lock().expect("no holder panics").send(message)?))
    }

    /// Has a VM send *commit*, with the line to itself.
    pub fn commit(&self) -> Commit {
        let writer = self.writer.clone();
        Box::new(move |vm| {
            let mut bytes = Vec::new();
            Message::Commit.encode(&mut bytes).expect("a commit is short");
            let control = writer.lock().expect("no holder panics");
            vm.commit(&mut Held { control, bytes })
        })
    }

    /// Puts messages into the inbox until the connection ends.
    pub fn read(&self, inbox: &Inbox<Note>) -> io::Result<()> {
        let mut reader = Control::new(self.stream.try_clone()?);
        loop {
            match reader.receive() {
                Ok(message) => inbox.put(Note::Message(message)),
                Err(error) => {
                    inbox.put(Note::Lost(told(&error)));
                    return Ok(());
                }
            }
        }
    }

    /// Says that this end is alive, until the other half of `ended` is dropped.
    pub fn beat(&self, ended: &Receiver<()>) {
        let mut post = self.post();
        while ended.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
            if post(&Message::Alive).is_err() {
                return; // The reader hears of it as well, and says why.
            }
        }
    }

    /// Ends the connection; the reader's thread comes back.
    pub fn hang_up(&self) {
        // What can't be shut down is gone already.
        let _ = self.stream.shutdown();
    }
}

/// The line while nobody else writes to it.
struct Held<'a> {
    control: MutexGuard<'a, Control<Stream>>,
    bytes: Vec<u8>,
}

impl CommitLine for Held<'_> {
    fn send(&mut self) -> Result<(), Trouble> {
        Ok(self.control.transport_mut().send_bytes(&self.bytes)?)
    }

    fn socket(&self) -> Option<(BorrowedFd<'_>, &[u8])> {
        Some((self.control.transport().as_fd(), &self.bytes))
    }
}

/// Well below the shortest silence that is taken for a death.
const BEAT: Duration = Duration::from_millis(250);
