//! The migration stream that a stock QEMU expects, composed around the device state that another one saved.
//! Knows the frame of the stream, and of its contents one section: the run state.

/// Composes the incoming stream for a target with this machine type: the saved device state with the run state
/// rewritten to paused, so that the target waits for `cont` whatever options it was started with. `page_bits`
/// belongs in where [`crate::Machine::page_bits`] says so.
pub fn compose(saved: &[u8], machine: &str, page_bits: Option<u32>) -> Result<Vec<u8>, StreamError> {
    let body = saved.strip_prefix(HEADER).ok_or_else(|| StreamError::Header { found: first_bytes(saved) })?;
    let run_state = find_run_state(body)?;
    let mut stream = Vec::with_capacity(saved.len() + machine.len() + 64);
    stream.extend_from_slice(HEADER);
    configuration(&mut stream, machine, page_bits);
    let body_at = stream.len();
    stream.extend_from_slice(body);
    stream[body_at + run_state..][..PAUSED.len()].copy_from_slice(PAUSED);
    // An empty description of the device state. Without it QEMU complains, and loads all the same.
    stream.push(VMDESC);
    counted_by_be32(&mut stream, b"{}");
    Ok(stream)
}

fn configuration(stream: &mut Vec<u8>, machine: &str, page_bits: Option<u32>) {
    stream.push(CONFIGURATION);
    counted_by_be32(stream, machine.as_bytes());
    if let Some(bits) = page_bits {
        const NAME: &[u8] = b"configuration/target-page-bits";
        stream.extend_from_slice(&[SUBSECTION, NAME.len() as u8]);
        stream.extend_from_slice(NAME);
        stream.extend_from_slice(&1u32.to_be_bytes());
        stream.extend_from_slice(&bits.to_be_bytes());
    }
}

fn counted_by_be32(stream: &mut Vec<u8>, bytes: &[u8]) {
    stream.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
    stream.extend_from_slice(bytes);
}

/// Where in `body` the contents of the section `globalstate` begin. Sections carry no length, so it is known by
/// its own header and its footer with the same id, at the right distance, behind another section's end. Guest
/// data that imitates all of this makes it two, which is refused rather than guessed.
fn find_run_state(body: &[u8]) -> Result<usize, StreamError> {
    if body.last() != Some(&EOF) {
        return Err(StreamError::Cut { bytes: body.len() });
    }
    let found: Vec<usize> = (0..body.len()).filter_map(|at| run_state_at(body, at)).collect();
    match found[..] {
        [at] => {
            let name =
                body[at + 4..][..RUN_STATE_BYTES - 4].split(|&byte| byte == 0).next().unwrap_or_default();
            match name {
                b"running" | b"paused" | b"prelaunch" => Ok(at),
                other => Err(StreamError::RunState { name: String::from_utf8_lossy(other).into_owned() }),
            }
        }
        _ => Err(StreamError::RunStateCount { count: found.len() }),
    }
}

/// Where the contents begin if a `globalstate` section begins at `at`.
fn run_state_at(body: &[u8], at: usize) -> Option<usize> {
    let section = &body[at..];
    let id = section.strip_prefix(&[FULL])?.first_chunk::<4>()?;
    let contents = section[5..].strip_prefix(NAME_AND_VERSION)?;
    let footer = contents.get(RUN_STATE_BYTES..)?.first_chunk::<5>()?;
    let closed = footer[0] == FOOTER && footer[1..] == *id;
    let follows = at == 0 || at >= 5 && body[at - 5] == FOOTER;
    (closed && follows).then_some(at + 5 + NAME_AND_VERSION.len())
}

fn first_bytes(saved: &[u8]) -> Vec<u8> {
    saved[..saved.len().min(HEADER.len())].to_vec()
}

/// Why saved device state can't be handed on.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum StreamError {
    #[error("the device state begins with {found:02x?} instead of a migration stream's header, version 3")]
    Header { found: Vec<u8> },
    #[error("the device state of {bytes} bytes does not end as it should: it was cut short")]
    Cut { bytes: usize },
    #[error("the device state holds the run state {count} times instead of once")]
    RunStateCount { count: usize },
    #[error("the device state was saved while the VM was {name:?}; it must be paused")]
    RunState { name: String },
}

/// `QEVM`, version 3.
const HEADER: &[u8] = b"QEVM\x00\x00\x00\x03";
const EOF: u8 = 0x00;
const FULL: u8 = 0x04;
const SUBSECTION: u8 = 0x05;
const VMDESC: u8 = 0x06;
const CONFIGURATION: u8 = 0x07;
const FOOTER: u8 = 0x7e;

/// The section's counted name, instance 0, version 1.
const NAME_AND_VERSION: &[u8] = b"\x0bglobalstate\x00\x00\x00\x00\x00\x00\x00\x01";

/// A be32 length and 100 bytes, of which the first are a name that ends in NUL (QEMU, migration/global_state.c).
const RUN_STATE_BYTES: usize = 104;

/// Length with the NUL, and the name. The longest name that is overwritten, `prelaunch`, is cut by the NUL.
const PAUSED: &[u8] = b"\x00\x00\x00\x07paused\x00";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn section(id: u32, name: &str, version: u32, contents: &[u8]) -> Vec<u8> {
        let mut bytes = vec![FULL];
        bytes.extend_from_slice(&id.to_be_bytes());
        bytes.push(name.len() as u8);
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(&0u32.to_be_bytes());
        bytes.extend_from_slice(&version.to_be_bytes());
        bytes.extend_from_slice(contents);
        bytes.push(FOOTER);
        bytes.extend_from_slice(&id.to_be_bytes());
        bytes
    }

    fn run_state(id: u32, name: &str) -> Vec<u8> {
        let mut contents = vec![0; RUN_STATE_BYTES];
        contents[..4].copy_from_slice(&(name.len() as u32 + 1).to_be_bytes());
        contents[4..4 + name.len()].copy_from_slice(name.as_bytes());
        section(id, "globalstate", 1, &contents)
    }

    fn saved(sections: &[Vec<u8>]) -> Vec<u8> {
        [HEADER, &sections.concat(), &[EOF]].concat()
    }

    #[test]
    fn a_stream_has_the_machine_in_front_the_run_state_paused_and_a_description_behind() {
        let timer = section(0, "timer", 2, &[7; 24]);
        let stream = compose(&saved(&[timer.clone(), run_state(9, "running")]), "pc-q35-10.0", None).unwrap();
        let mut wanted = b"QEVM\x00\x00\x00\x03\x07\x00\x00\x00\x0bpc-q35-10.0".to_vec();
        wanted.extend(timer);
        let mut paused = run_state(9, "running");
        paused[25..36].copy_from_slice(b"\x00\x00\x00\x07paused\x00");
        wanted.extend(paused);
        wanted.extend(b"\x00\x06\x00\x00\x00\x02{}");
        assert_eq!(stream, wanted);
    }

    /// The device state of `-machine none`, saved by QEMU 10.0.2.
    const RECORDED: &[u8] = include_bytes!("../tests/recorded/none-10.0.2.state");

    #[test]
    fn what_a_real_qemu_saved_differs_in_eight_bytes() {
        let stream = compose(RECORDED, "none", None).unwrap();
        let body = &stream[8 + 1 + 4 + 4..][..RECORDED.len() - 8];
        let changed: Vec<usize> = (0..body.len()).filter(|&at| body[at] != RECORDED[8 + at]).collect();
        assert_eq!(&body[changed[0]..][..8], b"\x07paused\x00");
        assert!(changed.iter().all(|at| (changed[0]..changed[0] + 8).contains(at)), "{changed:?}");
    }

    #[test]
    fn a_recorded_state_cut_anywhere_is_refused() {
        for bytes in 0..RECORDED.len() {
            assert!(compose(&RECORDED[..bytes], "none", None).is_err(), "{bytes} bytes");
        }
    }

    #[test]
    fn an_arm_stream_says_its_page_bits() {
        let stream = compose(&saved(&[run_state(0, "running")]), "virt-10.0", Some(12)).unwrap();
        let configuration = b"\x07\x00\x00\x00\x09virt-10.0\x05\x1econfiguration/target-page-bits\
            \x00\x00\x00\x01\x00\x00\x00\x0c\x04";
        assert_eq!(&stream[8..8 + configuration.len()], configuration);
    }

    #[test]
    fn guest_data_that_imitates_the_section_is_refused_not_guessed() {
        let disguise = [&[FOOTER, 0, 0, 0, 0][..], &run_state(9, "running")].concat();
        let fake = section(3, "serial", 1, &disguise);
        let refused = compose(&saved(&[fake, run_state(9, "running")]), "pc", None);
        assert_eq!(refused, Err(StreamError::RunStateCount { count: 2 }));
    }

    #[test]
    fn guest_data_with_only_the_name_is_no_section() {
        let name =
            section(3, "serial", 1, b"\x04\x00\x00\x00\x09\x0bglobalstate\x00\x00\x00\x00\x00\x00\x00\x01");
        assert!(compose(&saved(&[name, run_state(9, "running")]), "pc", None).is_ok());
    }

    #[test]
    fn state_that_was_not_saved_as_expected_is_refused_with_its_value() {
        let refuse = |bytes: &[u8]| compose(bytes, "pc", None).unwrap_err();
        assert_eq!(refuse(b""), StreamError::Header { found: vec![] });
        assert_eq!(
            refuse(b"QEVM\x00\x00\x00\x02"),
            StreamError::Header { found: b"QEVM\x00\x00\x00\x02".into() }
        );
        assert_eq!(refuse(HEADER), StreamError::Cut { bytes: 0 });
        assert_eq!(refuse(&saved(&[])), StreamError::RunStateCount { count: 0 });
        let failed = StreamError::RunState { name: "internal-error".into() };
        assert_eq!(refuse(&saved(&[run_state(1, "internal-error")])), failed);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400), cut in 0usize..400) {
            let _ = compose(&bytes, "pc", None);
            let mut near = saved(&[run_state(1, "running"), bytes.clone()]);
            near.truncate(cut);
            let _ = compose(&near, "pc", None);
            bytes.splice(0..0, HEADER.iter().copied());
            let _ = compose(&bytes, "pc", None);
        }
    }
}
