//! Listening, dialling and what goes wrong with them, on loopback and Unix sockets.

use nix::sys::socket::{getsockopt, sockopt};
use ram::{Span, SpanMut};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::{Duration, Instant};
use whimbrel_channel::{Address, Caller, ChannelError, Control, Listener, Stream, Transport};
use wire::{Message, Opening, Session};

const SECOND: Duration = Duration::from_secs(1);

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

/// A connection of each kind, and what has to stay for it.
fn pairs() -> Vec<(Stream, Stream, Listener, Option<tempfile::TempDir>)> {
    let directory = tempfile::tempdir().unwrap();
    let unix = Address::Unix { path: directory.path().join("socket") };
    let mut pairs = vec![pair(&unix, Some(directory)), pair(&address("tcp:127.0.0.1:0"), None)];
    pairs.push(pair(&address("tcp:localhost:0"), None));
    match std::net::TcpListener::bind("[::1]:0") {
        Ok(_) => pairs.push(pair(&address("tcp:[::1]:0"), None)),
        Err(error) => eprintln!("skipped over IPv6, which this machine does not have: {error}"),
    }
    pairs
}

fn pair(
    at: &Address,
    directory: Option<tempfile::TempDir>,
) -> (Stream, Stream, Listener, Option<tempfile::TempDir>) {
    let listener = Listener::bind(at).unwrap();
    let dialled = Stream::connect(listener.address(), SECOND).unwrap();
    let accepted = listener.accept(SECOND).unwrap().expect("somebody has dialled");
    (dialled, accepted, listener, directory)
}

#[test]
fn whole_packets_go_through_every_kind_of_connection() {
    for (mut from, mut to, ..) in pairs() {
        let sent: Vec<u8> = (0..2 << 20).map(|at: u32| (at ^ at >> 9) as u8).collect();
        let mut received = vec![0; sent.len()];
        thread::scope(|scope| {
            scope.spawn(|| {
                let spans: Vec<Span<'_>> = sent.chunks(4096).map(Span::from).collect();
                from.send(&spans).unwrap();
            });
            let mut spans: Vec<SpanMut<'_>> = received.chunks_mut(5000).map(SpanMut::from).collect();
            to.receive(&mut spans).unwrap();
        });
        assert!(sent == received, "{}", from.peer());
    }
}

#[test]
fn a_listener_tells_control_from_pages_and_both_from_strangers() {
    let listener = Listener::bind(&address("tcp:127.0.0.1:0")).unwrap();
    let dial = || Stream::connect(listener.address(), SECOND).unwrap();
    let called = || listener.accept(SECOND).unwrap().unwrap();

    let mut control = Control::dial(dial()).unwrap();
    let mut accepted = called();
    assert_eq!(accepted.caller(SECOND).unwrap(), Caller::Control);
    control.send(&Message::Cancel).unwrap();
    assert_eq!(Control::new(accepted).receive().unwrap(), Message::Cancel);

    let opening = Opening { uuid: [1; 16], channel: 0, session: Session([2; 16]) };
    dial().send_bytes(&opening.encode()).unwrap();
    let Caller::Page(bytes) = called().caller(SECOND).unwrap() else { panic!("a page channel") };
    assert_eq!(Opening::decode(&bytes, 1), Ok(opening));

    for (first, hint) in [
        (b"QEVM....", "QEMU's own migration"),
        (b"GET / HT", "HTTP"),
        (b"\x01\x02\x03\x04....", "0x01020304"),
    ] {
        dial().send_bytes(first).unwrap();
        let error = called().caller(SECOND).unwrap_err();
        assert!(
            matches!(error, ChannelError::Stranger { .. }) && error.to_string().contains(hint),
            "{error}"
        );
    }
    dial().send_bytes(b"WHMB\0\0\0\x01").unwrap();
    assert!(matches!(called().caller(SECOND), Err(ChannelError::Stranger { .. })));
}

#[test]
fn one_who_says_a_byte_now_and_then_is_dropped_in_time() {
    let listener = Listener::bind(&address("tcp:127.0.0.1:0")).unwrap();
    let mut slow = Stream::connect(listener.address(), SECOND).unwrap();
    let mut accepted = listener.accept(SECOND).unwrap().unwrap();
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(move || {
            // 64 bytes of an opening would take 3.2 s at this pace.
            let mut opening =
                Opening { uuid: [0; 16], channel: 0, session: Session([0; 16]) }.encode().into_iter();
            while opening.next().is_some_and(|byte| slow.send_bytes(&[byte]).is_ok()) {
                thread::sleep(Duration::from_millis(50));
            }
        });
        let error = accepted.caller(Duration::from_millis(400)).unwrap_err();
        assert!(
            matches!(&error, ChannelError::Silent { source, .. } if source.kind() == ErrorKind::TimedOut),
            "{error:?}"
        );
        accepted.shutdown().unwrap();
    });
    let took = start.elapsed();
    assert!((Duration::from_millis(400)..2 * SECOND).contains(&took), "{took:?}");
}

#[test]
fn time_limits_hold_in_both_directions() {
    for (mut from, mut to, ..) in pairs() {
        to.set_receive_timeout(Some(Duration::from_millis(50))).unwrap();
        assert_eq!(to.receive_bytes(&mut [0; 4]).unwrap_err().kind(), ErrorKind::TimedOut);
        from.set_send_timeout(Some(Duration::from_millis(50))).unwrap();
        let more_than_any_buffer = vec![0; 64 << 20];
        assert_eq!(from.send_bytes(&more_than_any_buffer).unwrap_err().kind(), ErrorKind::TimedOut);
    }
}

#[test]
fn waiting_takes_no_byte_and_knows_the_end() {
    for (mut from, mut to, ..) in pairs() {
        assert!(!to.wait(Duration::from_millis(20)).unwrap());
        from.send_bytes(&[7]).unwrap();
        assert!(to.wait(SECOND).unwrap());
        let mut byte = [0];
        to.receive_bytes(&mut byte).unwrap();
        assert_eq!(byte, [7]);
        drop(from);
        assert!(to.wait(SECOND).unwrap());
        assert_eq!(to.receive_bytes(&mut byte).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}

#[test]
fn a_shutdown_wakes_who_waits_to_receive_and_who_waits_to_send() {
    for (mut from, to, ..) in pairs() {
        let mut reader = to.try_clone().unwrap();
        let hand = from.try_clone().unwrap();
        thread::scope(|scope| {
            let receives = scope.spawn(move || reader.receive_bytes(&mut vec![0; 100 << 20]).unwrap_err());
            thread::sleep(Duration::from_millis(50));
            to.shutdown().unwrap();
            assert_eq!(receives.join().unwrap().kind(), ErrorKind::UnexpectedEof);
        });
        assert!(from.send_bytes(&[0; 1 << 20]).is_err());
        hand.shutdown().unwrap();
    }
    for (mut from, _to, ..) in pairs() {
        let hand = from.try_clone().unwrap();
        thread::scope(|scope| {
            let sends = scope.spawn(move || from.send_bytes(&vec![0; 100 << 20]).unwrap_err());
            thread::sleep(Duration::from_millis(50));
            hand.shutdown().unwrap();
            sends.join().unwrap();
        });
    }
}

#[test]
fn nothing_paces_what_stays_on_this_host() {
    for (from, to, ..) in pairs().into_iter().filter(|(from, ..)| from.peer().starts_with("tcp:")) {
        for end in [from, to] {
            let control = getsockopt(&end, sockopt::TcpCongestion).unwrap();
            assert_eq!(control.to_string_lossy().trim_end_matches('\0'), "reno", "{}", end.peer());
        }
    }
}

#[test]
fn a_listener_that_is_closed_wakes_who_waits_to_accept() {
    let directory = tempfile::tempdir().unwrap();
    let unix = Address::Unix { path: directory.path().join("socket") };
    for at in [unix, address("tcp:127.0.0.1:0")] {
        let listener = Listener::bind(&at).unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| listener.accept(60 * SECOND));
            thread::sleep(Duration::from_millis(20));
            let closed_at = Instant::now();
            listener.close();
            assert!(waiting.join().unwrap().is_err());
            assert!(closed_at.elapsed() < SECOND);
        });
        Stream::connect(listener.address(), SECOND).unwrap_err();
    }
}

#[test]
fn nobody_there_is_an_error_that_names_the_address() {
    let gone = Listener::bind(&address("tcp:127.0.0.1:0")).unwrap().address().clone();
    let error = Stream::connect(&gone, SECOND).unwrap_err();
    assert_eq!(error.to_string(), format!("cannot connect to {gone}"));
    let error = Stream::connect(&address("unix:/nonexistent/socket"), SECOND).unwrap_err();
    assert_eq!(error.to_string(), "cannot connect to unix:/nonexistent/socket");
    assert!(
        Listener::bind(&address("tcp:127.0.0.1:0"))
            .unwrap()
            .accept(Duration::from_millis(20))
            .unwrap()
            .is_none()
    );
}

#[test]
fn a_socket_file_is_private_and_goes_with_its_listener() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let place = Address::Unix { path: path.clone() };
    let listener = Listener::bind(&place).unwrap();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn only_a_socket_that_nobody_listens_on_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let place = Address::Unix { path: path.clone() };

    drop(UnixListener::bind(&path).unwrap());
    let first = Listener::bind(&place).unwrap();
    assert!(matches!(Listener::bind(&place), Err(ChannelError::Listen { .. })), "somebody listens");
    assert!(Stream::connect(&place, SECOND).is_ok(), "and still does");

    // Somebody else's file in the place of ours is left alone.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "mine").unwrap();
    drop(first);
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    assert!(matches!(Listener::bind(&place), Err(ChannelError::Listen { .. })), "not a socket");
}

#[test]
fn a_listener_too_busy_to_answer_keeps_its_socket() {
    let directory = tempfile::tempdir().unwrap();
    let place = Address::Unix { path: directory.path().join("socket") };
    let _busy = Listener::bind(&place).unwrap();
    let dial = || Stream::connect(&place, Duration::from_millis(50));
    // Nobody accepts, so its queue fills up.
    let waiting: Vec<Stream> = std::iter::from_fn(|| dial().ok()).take(1000).collect();
    assert!(waiting.len() < 1000);
    let error = dial().unwrap_err();
    assert!(
        matches!(&error, ChannelError::Connect { source, .. } if source.kind() == ErrorKind::TimedOut),
        "{error:?}"
    );
    assert!(matches!(Listener::bind(&place), Err(ChannelError::Listen { .. })));
    drop(waiting);
    assert!(directory.path().join("socket").exists());
}

#[test]
fn a_peer_that_goes_half_and_then_wholly_is_noticed_at_each_step() {
    let listener = Listener::bind(&address("tcp:127.0.0.1:0")).unwrap();
    let Address::Tcp { port, .. } = *listener.address() else { panic!("an address over TCP") };
    let mut plain = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut accepted = listener.accept(SECOND).unwrap().unwrap();
    plain.write_all(b"abc").unwrap();
    plain.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(accepted.receive_bytes(&mut [0; 4]).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    accepted.send_bytes(b"xyz").unwrap();
    let mut answer = [0; 3];
    plain.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"xyz");
    drop(plain);
    let end = Instant::now() + SECOND;
    while accepted.send_bytes(&[0; 4096]).is_ok() {
        assert!(Instant::now() < end);
    }
}
