//! Spans in and out of a socket in as few calls as the kernel allows. Makes no decision but to go on after a
//! part or a signal.

#![expect(unsafe_code, reason = "the kernel reads and writes guest RAM through raw spans")]

use libc::{iovec, msghdr};
use ram::{Span, SpanMut};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Sends all bytes of `spans`. A peer that is gone is an error and no signal.
pub(crate) fn send(socket: BorrowedFd<'_>, spans: &[Span<'_>]) -> io::Result<()> {
    let parts = spans.iter().map(|span| part(span.as_ptr().cast_mut(), span.len()));
    each(parts, |parts| {
        // SAFETY: the parts lie in `spans`, which stay readable while they are borrowed; the kernel only reads.
        again(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &message(parts), libc::MSG_NOSIGNAL) })
    })
}

/// Fills all of `spans`. `before_each` runs ahead of every call into the kernel and can end it.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    spans: &mut [SpanMut<'_>],
    before_each: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    let parts = spans.iter_mut().map(|span| part(span.as_mut_ptr(), span.len()));
    each(parts, |parts| {
        before_each()?;
        // Without WAITALL a packet would come in dozens of calls, each as large as what had just arrived.
        // SAFETY: the parts lie in `spans`, which stay writable while they are borrowed.
        again(|| unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message(parts), libc::MSG_WAITALL) })
    })
}

/// Hands parts to `call`, as many at a time as fit, until it has done every byte of them. `call` says how many
/// bytes it did; none means that there will be no more.
fn each(
    parts: impl Iterator<Item = iovec>,
    mut call: impl FnMut(&mut [iovec]) -> io::Result<usize>,
) -> io::Result<()> {
    let mut parts = parts.filter(|part| part.iov_len > 0);
    let mut window = [part(std::ptr::null_mut(), 0); PARTS_MAX];
    loop {
        let count = window.iter_mut().zip(&mut parts).map(|(slot, part)| *slot = part).count();
        if count == 0 {
            return Ok(());
        }
        let mut rest = &mut window[..count];
        while !rest.is_empty() {
            match call(rest)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                bytes => rest = skip(rest, bytes),
            }
        }
    }
}

/// What is left of `parts` after their first `bytes` bytes.
fn skip(mut parts: &mut [iovec], mut bytes: usize) -> &mut [iovec] {
    while let [first, ..] = parts
        && first.iov_len <= bytes
    {
        bytes -= first.iov_len;
        parts = &mut parts[1..];
    }
    if bytes > 0 {
        let first = parts.first_mut().expect("the kernel does no more than it is told");
        first.iov_base = first.iov_base.wrapping_byte_add(bytes);
        first.iov_len -= bytes;
    }
    parts
}

/// Calls until no signal got in the way.
fn again(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            // The socket blocks, so this is what the kernel says when its time limit is over.
            io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
            _ => return Err(error),
        }
    }
}

fn part(at: *mut u8, len: usize) -> iovec {
    iovec { iov_base: at.cast(), iov_len: len }
}

fn message(parts: &mut [iovec]) -> msghdr {
    // SAFETY: all zeros are a message without a name, parts or control data.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    message
}

/// Parts of one call: a header and the 128 pages of a packet, with room to spare. The kernel's limit is 1024.
const PARTS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    /// Bytes that differ from their neighbours at any distance a mix-up would have.
    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect()
    }

    fn cut<'a>(mut bytes: &'a mut [u8], lens: impl IntoIterator<Item = &'a usize>) -> Vec<SpanMut<'a>> {
        let mut spans = Vec::new();
        for &len in lens {
            let (part, rest) = bytes.split_at_mut(len);
            spans.push(part.into());
            bytes = rest;
        }
        spans
    }

    fn lens(count_max: usize) -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(prop_oneof![Just(0usize), 1usize..5000], 0..count_max)
    }

    proptest! {
        #[test]
        fn every_byte_is_done_once_and_in_order_however_little_the_kernel_does(
            lens in lens(600),
            portions in prop::collection::vec(prop_oneof![1usize..20, 1usize..200_000], 1..50),
        ) {
            let mut bytes = pattern(lens.iter().sum());
            let spans = cut(&mut bytes, &lens);
            let (mut done, mut portions) = (Vec::<u8>::new(), portions.iter().cycle());
            each(spans.into_iter().map(|mut span| part(span.as_mut_ptr(), span.len())), |parts| {
                assert!((1..=PARTS_MAX).contains(&parts.len()));
                let (before, portion) = (done.len(), *portions.next().unwrap());
                for part in parts {
                    let len = part.iov_len.min(portion - (done.len() - before));
                    // SAFETY: the part is one of `bytes`, which outlive this.
                    done.extend_from_slice(unsafe { std::slice::from_raw_parts(part.iov_base.cast_const().cast(), len) });
                }
                Ok(done.len() - before)
            })
            .unwrap();
            prop_assert!(done == bytes);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn spans_arrive_whole_though_the_ends_cut_them_differently(lens in lens(600)) {
            let (from, to) = UnixStream::pair().unwrap();
            let mut sent = pattern(lens.iter().sum());
            let mut received = vec![0; sent.len()];
            thread::scope(|scope| {
                let mut parts = cut(&mut sent, &lens);
                scope.spawn(move || {
                    // SAFETY: readable as long as the mutable span that it stands for.
                    let read = |span: &mut SpanMut<'_>| unsafe {
                        Span::new(std::ptr::NonNull::new(span.as_mut_ptr()).unwrap(), span.len())
                    };
                    let spans: Vec<Span<'_>> = parts.iter_mut().map(read).collect();
                    send(from.as_fd(), &spans).unwrap();
                });
                receive(to.as_fd(), &mut cut(&mut received, lens.iter().rev()), || Ok(())).unwrap();
            });
            prop_assert!(received == sent);
        }
    }

    #[test]
    fn the_end_in_the_middle_is_an_error_and_a_lost_peer_no_signal() {
        // As it is in a program that did not ask for otherwise; Rust's own start-up has it ignored.
        // SAFETY: no handler of ours is involved.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        let (from, to) = UnixStream::pair().unwrap();
        let mut bytes = [0; 10];
        send(from.as_fd(), &[Span::from(&[1u8, 2, 3][..])]).unwrap();
        drop(from);
        receive(to.as_fd(), &mut [SpanMut::from(&mut bytes[..0])], || Ok(())).unwrap();
        let error = receive(to.as_fd(), &mut [SpanMut::from(&mut bytes[..])], || Ok(())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(
            send(to.as_fd(), &[Span::from(&[1u8][..])]).unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
    }
}
