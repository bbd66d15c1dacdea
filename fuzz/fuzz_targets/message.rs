//! Any bytes after a greeting are messages that read back, up to an error. What a person will see of them has no
//! control characters.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wire::{FRAME_BYTES, Frame, Message};

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    while let Some((head, after)) = rest.split_first_chunk() {
        let frame = match Frame::decode(head) {
            Ok(frame) => frame,
            Err(error) => return assert!(!error.to_string().contains(char::is_control)),
        };
        // A message that is cut short is tried as well: that is how a mutation gets to its inside.
        let (payload, after) = after.split_at(frame.bytes.min(after.len()));
        check(frame.kind, payload);
        rest = after;
    }
});

fn check(kind: u32, payload: &[u8]) {
    let message = match Message::decode(kind, payload.to_vec()) {
        Ok(message) => message,
        Err(error) => return assert!(!error.to_string().contains(char::is_control)),
    };
    assert_eq!(message.kind(), kind);
    let mut again = Vec::new();
    message.encode(&mut again).expect("what was within the bounds stays within them");
    assert_eq!(Message::decode(kind, again.split_off(FRAME_BYTES)), Ok(message.clone()));
    match message {
        Message::Failed { reason } | Message::Refuse { reason } => {
            assert!(!reason.contains(char::is_control));
        }
        Message::Hello(hello) => {
            assert!(hello.channels > 0);
            let names = hello.layout.iter().map(|(_, block)| &block.name);
            let texts = [&hello.version, &hello.qemu, &hello.machine, &hello.cpu, &hello.method];
            assert!(!names.chain(texts).any(|text| text.contains(char::is_control)));
        }
        _ => {}
    }
}
