//! A proxy between source and target that cuts the control connection at *commit*. Knows of the protocol just
//! enough to see it: frames of kind and length after an 8-byte greeting.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// What becomes of new connections after the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    NewConnectionsPass,
    NothingPasses,
}

/// Whether the commit itself gets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Commit {
    Passes,
    Swallowed,
}

/// Listens on a port of its own until it is dropped with the test.
pub struct Proxy {
    port: u16,
    closed: Arc<AtomicBool>,
}

impl Proxy {
    /// Lets *commit* through and then cuts, so that its answer is lost.
    pub fn cutting_at_commit(target: &str, after: After) -> Self {
        Self::start(target, Commit::Passes, after)
    }

    /// Cuts in the place of *commit*.
    pub fn swallowing_commit(target: &str) -> Self {
        Self::start(target, Commit::Swallowed, After::NewConnectionsPass)
    }

    /// The address to migrate to.
    pub fn address(&self) -> String {
        format!("tcp:127.0.0.1:{}", self.port)
    }

    /// From now on new connections pass.
    pub fn let_pass(&self) {
        self.closed.store(false, SeqCst);
    }

    fn start(target: &str, commit: Commit, after: After) -> Self {
        let target = target.strip_prefix("tcp:").expect("a TCP target").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port on loopback");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let closed = Arc::new(AtomicBool::new(false));
        let proxy = Self { port, closed: closed.clone() };
        std::thread::spawn(move || {
            for source in listener.incoming().flatten() {
                let closed = closed.clone();
                let Ok(target) = TcpStream::connect(&target) else { continue };
                if closed.load(SeqCst) {
                    continue; // Dropped.
                }
                std::thread::spawn(move || pass(source, target, commit, after, &closed));
            }
        });
        proxy
    }
}

fn pass(source: TcpStream, target: TcpStream, commit: Commit, after: After, closed: &AtomicBool) {
    let (from, to) = (target.try_clone().expect("a clone"), source.try_clone().expect("a clone"));
    let back = std::thread::spawn(move || copy(from, to));
    let mut first = [0; 8];
    (&source).read_exact(&mut first[..4]).expect("a connection says what it is");
    (&target).write_all(&first[..4]).expect("the target listens");
    if &first[..4] != b"WHMB" {
        copy(source, target);
        return;
    }
    (&source).read_exact(&mut first[4..]).expect("a greeting");
    (&target).write_all(&first[4..]).expect("the target listens");
    if pass_frames(&source, &target, commit).is_some() {
        closed.store(after == After::NothingPasses, SeqCst);
    }
    let _ = source.shutdown(Shutdown::Both);
    if commit == Commit::Swallowed {
        let _ = target.shutdown(Shutdown::Both);
    } else {
        // The target must see its commit before it sees the end.
        let _ = target.shutdown(Shutdown::Write);
    }
    drop(back);
}

/// Copies messages; some at *commit*, none if the connection ended before.
fn pass_frames(mut source: &TcpStream, mut target: &TcpStream, commit: Commit) -> Option<()> {
    loop {
        let mut head = [0; 8];
        source.read_exact(&mut head).ok()?;
        let kind = u32::from_be_bytes(head[..4].try_into().expect("four bytes"));
        let length = u32::from_be_bytes(head[4..].try_into().expect("four bytes"));
        let mut payload = vec![0; length as usize];
        source.read_exact(&mut payload).ok()?;
        let is_commit = kind == COMMIT;
        if is_commit && commit == Commit::Swallowed {
            return Some(());
        }
        target.write_all(&head).ok()?;
        target.write_all(&payload).ok()?;
        if is_commit {
            return Some(());
        }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}

/// The number of the message *commit*.
const COMMIT: u32 = 6;
