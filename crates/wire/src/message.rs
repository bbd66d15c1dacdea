//! The messages of the control connection, in JSON but for the device state. The same JSON names the message
//! again, so a capture can be read without a table of numbers.

use crate::frame::Frame;
use crate::text::is_plain;
use crate::{Hash, Session, WireError, hex, shown, text};
use ram::Layout;
use serde::{Deserialize, Serialize};

/// What one end tells the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Message {
    /// Source: the proposal, first of all.
    Hello(Hello),
    /// `whimbrel resolve`, in place of a Hello: what became of this migration?
    Ask {
        /// The migration in doubt.
        session: Session,
    },
    /// Source: every page has been sent once each channel has passed this sync.
    Finish {
        /// Syncs of a channel are counted from 0.
        sync: u64,
    },
    /// Source, if it proposed to verify: what the target should find in its RAM now.
    Hashes {
        /// RAM block and hash.
        blocks: Vec<(String, Hash)>,
    },
    /// Source: the device state, as QEMU saved it.
    #[serde(skip)]
    Device(Vec<u8>),
    /// Source: the target may run the VM from here on.
    Commit,
    /// Source: it has heard that the target runs.
    Confirmed,

    /// Target: the proposal stands.
    Accept(Accept),
    /// Target: the proposal does not stand.
    Refuse {
        /// Why, and what to do about it.
        #[serde(with = "text")]
        reason: String,
    },
    /// Target: all channels have passed this sync.
    Synced {
        /// Counted as in [`Message::Finish`].
        sync: u64,
    },
    /// Target: its RAM has the hashes of the source.
    Verified {
        /// How many pages were hashed.
        pages: u64,
    },
    /// Target: the VM is loaded and paused.
    Ready {
        /// Milliseconds that QEMU took to load the device state.
        load_ms: u64,
    },
    /// Target: the VM runs.
    Running,
    /// Target: the answer to [`Message::Ask`].
    Answer {
        /// The migration it was asked for.
        session: Session,
        /// How far that came.
        state: TargetState,
    },

    /// Either end: it gives up.
    Failed {
        /// Why.
        #[serde(with = "text")]
        reason: String,
    },
    /// Either end: its operator gives up.
    Cancel,
    /// Either end, at intervals: it is still there.
    Alive,
}

/// What a source proposes, and what the target needs to know to accept it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Hello {
    /// Oldest protocol it can speak.
    pub protocol_min: u32,
    /// Newest protocol it can speak, not below the oldest.
    pub protocol_max: u32,
    /// The migration, drawn at random.
    pub session: Session,
    /// Version of whimbrel.
    #[serde(with = "text")]
    pub version: String,
    /// Version of QEMU.
    #[serde(with = "text")]
    pub qemu: String,
    /// Machine type with its version, for example `pc-q35-10.0`.
    #[serde(with = "text")]
    pub machine: String,
    /// CPU model.
    #[serde(with = "text")]
    pub cpu: String,
    /// CPUs of the VM.
    pub vcpus: u32,
    /// Bits of a target page, where the machine says so in its stream (arm64); none on x86.
    pub page_bits: Option<u32>,
    /// RAM blocks of the VM.
    pub layout: Layout,
    /// UUID of the VM; zero where it has none.
    #[serde(with = "hex")]
    pub uuid: [u8; 16],
    /// Page channels, at least 1.
    pub channels: u8,
    /// Bytes of pages in a packet, for [`Format::new`](crate::Format::new).
    pub packet_bytes: u32,
    /// Compression method, by QEMU's name.
    #[serde(with = "text")]
    pub method: String,
    /// Whether both ends hash all RAM at the switchover.
    pub verify: bool,
    /// Whether the VM runs; one that is paused stays paused.
    pub running: bool,
}

/// What a target answers to a proposal that it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Accept {
    /// The protocol both will speak.
    pub protocol: u32,
    /// Version of whimbrel.
    #[serde(with = "text")]
    pub version: String,
    /// Version of QEMU.
    #[serde(with = "text")]
    pub qemu: String,
    /// The migration that was proposed.
    pub session: Session,
}

/// How far a migration came at its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetState {
    /// No commit came, and none will be taken any more.
    NeverCommitted,
    /// The commit came; whether the VM runs is not known.
    Committed,
    /// The VM runs at the target.
    Running,
    /// The target knows nothing of this migration.
    Unknown,
}

impl Message {
    /// Appends the message with what stands ahead of it. Fails only if it is longer than its kind may be, which
    /// a device state can be.
    pub fn encode(&self, into: &mut Vec<u8>) -> Result<(), WireError> {
        let json;
        let payload = match self {
            Message::Device(state) => state,
            other => {
                json = serde_json::to_vec(other).expect("no map with odd keys is in a message");
                &json
            }
        };
        let frame = Frame::new(self.kind(), payload.len())?;
        into.extend_from_slice(&frame.encode());
        into.extend_from_slice(payload);
        Ok(())
    }

    /// Reads the message that follows a [`Frame`]. Text in it that is meant for people is fit to be shown.
    pub fn decode(kind: u32, payload: Vec<u8>) -> Result<Self, WireError> {
        Frame::new(kind, payload.len())?;
        if kind == DEVICE {
            return Ok(Message::Device(payload));
        }
        if !is_known(kind) {
            return Err(WireError::Kind { kind });
        }
        let message: Message = serde_json::from_slice(&payload)
            .map_err(|error| WireError::Unreadable { kind, reason: shown(&error.to_string()) })?;
        let inside = message.kind();
        if inside != kind {
            return Err(WireError::Mismatch { kind, inside });
        }
        message.check()?;
        Ok(message)
    }

    /// The number of its kind. Numbers are never given twice.
    pub fn kind(&self) -> u32 {
        match self {
            Message::Hello(_) => 1,
            Message::Ask { .. } => 2,
            Message::Finish { .. } => 3,
            Message::Hashes { .. } => 4,
            Message::Device(_) => DEVICE,
            Message::Commit => 6,
            Message::Confirmed => 7,
            Message::Accept(_) => 32,
            Message::Refuse { .. } => 33,
            Message::Synced { .. } => 34,
            Message::Verified { .. } => 35,
            Message::Ready { .. } => 36,
            Message::Running => 37,
            Message::Answer { .. } => 38,
            Message::Failed { .. } => 64,
            Message::Cancel => 65,
            Message::Alive => 66,
        }
    }

    /// What the types don't say.
    fn check(&self) -> Result<(), WireError> {
        let wrong =
            |what, value: String| Err(WireError::Value { kind: self.kind(), what, value: shown(&value) });
        let odd = |name: &&str| !is_plain(name);
        match self {
            Message::Hello(hello) => {
                if hello.channels == 0 {
                    return wrong("a number of channels of", "0".into());
                }
                if hello.protocol_min > hello.protocol_max {
                    return wrong(
                        "protocols from",
                        format!("{} to {}", hello.protocol_min, hello.protocol_max),
                    );
                }
                let mut names = hello.layout.iter().map(|(_, block)| block.name.as_str());
                names.find(odd).map_or(Ok(()), |name| wrong(ODD_NAME, name.into()))
            }
            Message::Hashes { blocks } => {
                let mut names = blocks.iter().map(|(name, _)| name.as_str());
                names.find(odd).map_or(Ok(()), |name| wrong(ODD_NAME, name.into()))
            }
            _ => Ok(()),
        }
    }
}

/// Whether a message of this number exists.
pub(crate) fn is_known(kind: u32) -> bool {
    matches!(kind, 1..=7 | 32..=38 | 64..=66)
}

/// The only kind that is not JSON.
pub(crate) const DEVICE: u32 = 5;

const ODD_NAME: &str = "a RAM block with unprintable characters in its name:";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FRAME_BYTES;
    use proptest::prelude::*;
    use ram::Block;

    fn hello() -> Hello {
        let block = Block { name: "pc.ram".into(), used_bytes: 64 << 20, page_bytes: 4096 };
        Hello {
            protocol_min: 1,
            protocol_max: 3,
            session: Session([7; 16]),
            version: "0.1.0".into(),
            qemu: "10.0.2".into(),
            machine: "pc-q35-10.0".into(),
            cpu: "qemu64".into(),
            vcpus: 2,
            page_bits: None,
            layout: Layout::new(vec![block]).unwrap(),
            uuid: [1; 16],
            channels: 4,
            packet_bytes: 512 << 10,
            method: "none".into(),
            verify: true,
            running: true,
        }
    }

    /// One of each kind.
    fn all() -> Vec<Message> {
        let session = Session([7; 16]);
        let (version, qemu) = ("0.1.0".to_owned(), "10.0.2".to_owned());
        vec![
            Message::Hello(hello()),
            Message::Ask { session },
            Message::Finish { sync: 9 },
            Message::Hashes { blocks: vec![("pc.ram".into(), Hash([0xab; 32]))] },
            Message::Device(vec![0, 0xff, 3]),
            Message::Commit,
            Message::Confirmed,
            Message::Accept(Accept { protocol: 1, version, qemu, session }),
            Message::Refuse { reason: "other machine".into() },
            Message::Synced { sync: u64::MAX },
            Message::Verified { pages: 16384 },
            Message::Ready { load_ms: 4 },
            Message::Running,
            Message::Answer { session, state: TargetState::NeverCommitted },
            Message::Failed { reason: "link".into() },
            Message::Cancel,
            Message::Alive,
        ]
    }

    fn encoded(message: &Message) -> (u32, Vec<u8>) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).unwrap();
        let payload = bytes.split_off(FRAME_BYTES);
        let frame = Frame::decode(bytes.as_slice().try_into().unwrap()).unwrap();
        assert_eq!(frame.bytes, payload.len());
        (frame.kind, payload)
    }

    #[test]
    fn every_message_reads_back() {
        for message in all() {
            let (kind, payload) = encoded(&message);
            assert_eq!(Message::decode(kind, payload), Ok(message));
        }
    }

    #[test]
    fn the_messages_of_protocol_1_are_read_for_ever() {
        let mut golden = include_bytes!("../golden/messages-1.bin").as_slice();
        for message in all() {
            let (head, rest) = golden.split_first_chunk().unwrap();
            let frame = Frame::decode(head).unwrap();
            let (payload, rest) = rest.split_at(frame.bytes);
            assert_eq!(Message::decode(frame.kind, payload.to_vec()), Ok(message));
            golden = rest;
        }
        assert!(golden.is_empty());
    }

    #[test]
    fn the_known_kinds_are_those_of_the_messages() {
        let kinds: Vec<u32> = all().iter().map(Message::kind).collect();
        let known: Vec<u32> = (0..1000).filter(|&kind| is_known(kind)).collect();
        assert_eq!(kinds, known, "in the order of the numbers, none twice");
    }

    #[test]
    fn text_of_the_peer_is_fit_to_be_shown() {
        let message =
            Message::decode(64, br#"{"failed":{"reason":"no \u001b[31mroom\nleft\u202e"}}"#.to_vec());
        assert_eq!(message, Ok(Message::Failed { reason: "no [31mroom left".into() }));
        let (_, long) = encoded(&Message::Refuse { reason: "x".repeat(2 << 20) });
        assert!(long.len() < 2000);
    }

    #[test]
    fn an_error_about_a_message_has_no_escape_sequence_of_the_peer() {
        let error = Message::decode(64, b"{\"\x1b[2J\":1}".to_vec()).unwrap_err();
        assert!(!error.to_string().contains('\x1b'), "{error}");
        let error = Message::decode(64, br#"{"\u001b[2J":1}"#.to_vec()).unwrap_err();
        assert!(!error.to_string().contains('\x1b'), "{error}");
    }

    #[test]
    fn a_block_name_that_cannot_be_shown_is_refused() {
        let mut hello = hello();
        let name = "pc\x1b[2J".to_owned();
        hello.layout = Layout::new(vec![Block { name, used_bytes: 4096, page_bytes: 4096 }]).unwrap();
        let (kind, payload) = encoded(&Message::Hello(hello));
        let error = Message::decode(kind, payload).unwrap_err();
        assert_eq!(error, WireError::Value { kind: 1, what: ODD_NAME, value: "pc[2J".into() });
    }

    #[test]
    fn a_hello_that_makes_no_sense_is_refused() {
        let error = |hello: Hello| {
            let (kind, payload) = encoded(&Message::Hello(hello));
            Message::decode(kind, payload).unwrap_err().to_string()
        };
        assert!(error(Hello { channels: 0, ..hello() }).contains("channels of \"0\""));
        assert!(error(Hello { protocol_min: 4, ..hello() }).contains("\"4 to 3\""));
        let (kind, payload) = encoded(&Message::Hello(hello()));
        let odd = String::from_utf8(payload).unwrap().replace("67108864", "67108865");
        let error = Message::decode(kind, odd.into_bytes()).unwrap_err().to_string();
        assert!(error.contains("67108865 bytes, which is not"), "{error}");
    }

    #[test]
    fn a_message_under_the_number_of_another_is_refused() {
        let (_, payload) = encoded(&Message::Commit);
        assert_eq!(Message::decode(66, payload.clone()), Err(WireError::Mismatch { kind: 66, inside: 6 }));
        assert_eq!(Message::decode(8, payload.clone()), Err(WireError::Kind { kind: 8 }));
        assert!(matches!(Message::decode(5, payload), Ok(Message::Device(_))));
    }

    #[test]
    fn a_device_state_beyond_its_bound_is_an_error_and_no_panic() {
        let mut bytes = Vec::new();
        let error = Message::Device(vec![0; (64 << 20) + 1]).encode(&mut bytes);
        assert!(matches!(error, Err(WireError::TooLong { kind: 5, .. })));
        assert!(bytes.is_empty());
    }

    #[test]
    fn a_field_of_a_newer_whimbrel_is_looked_over() {
        let message = Message::decode(3, br#"{"finish":{"sync":2,"later":[1,{}]}}"#.to_vec());
        assert_eq!(message, Ok(Message::Finish { sync: 2 }));
    }

    proptest! {
        #[test]
        fn a_changed_message_is_refused_or_reads_back(
            which in prop::sample::select(all()),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            cut: prop::sample::Index,
        ) {
            let (kind, mut payload) = encoded(&which);
            for (at, byte) in &changes {
                let at = at.index(payload.len());
                payload[at] = *byte;
            }
            if changes.len() % 2 == 1 {
                payload.truncate(cut.index(payload.len() + 1));
            }
            if let Ok(message) = Message::decode(kind, payload) {
                let (kind, payload) = encoded(&message);
                prop_assert_eq!(Message::decode(kind, payload), Ok(message));
            }
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(kind in 0u32..80, payload: Vec<u8>) {
            if let Ok(message) = Message::decode(kind, payload) {
                prop_assert_eq!(message.kind(), kind);
            }
        }
    }
}
