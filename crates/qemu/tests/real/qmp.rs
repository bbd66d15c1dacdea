//! The QMP client against a real monitor.

use crate::bed::qemu_or_skip;
use serde_json::json;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};
use whimbrel_qemu::qmp::{Qmp, QmpError};

#[test]
fn a_monitor_that_another_client_holds_is_named_as_such() {
    let qemu = qemu_or_skip!("-S");
    let _held = qemu.connect();
    let silent = Qmp::connect(&qemu.qmp(), Duration::from_millis(100)).unwrap_err();
    assert!(matches!(silent, QmpError::Silent { .. }), "{silent}");
    assert!(silent.to_string().contains("another client holds this monitor"));
}

#[test]
fn a_refused_command_carries_its_name_and_qemus_words() {
    let qemu = qemu_or_skip!("-S");
    let mut vm = qemu.connect();
    let refused = vm.qmp().execute("remove-fd", json!({ "fdset-id": 77 })).unwrap_err();
    let text = refused.to_string();
    assert!(text.starts_with("QEMU refused remove-fd: ") && text.contains("77"), "{text}");
    assert!(!refused.is_unknown());
    assert!(vm.qmp().execute("no-such-command", json!({})).unwrap_err().is_unknown());
    assert!(vm.qmp().execute("query-status", json!({ "extra": 1 })).unwrap_err().is_unknown());
}

#[test]
fn an_answer_that_came_too_late_is_not_taken_for_the_next_one() {
    let qemu = qemu_or_skip!("-S");
    let mut vm = qemu.connect();
    let late = vm.qmp().execute_within("query-version", json!({}), Duration::ZERO);
    assert!(matches!(late, Err(QmpError::Late { command: "query-version", .. })), "{late:?}");
    let status = vm.qmp().execute("query-status", json!({})).unwrap();
    assert_eq!(status["status"], "prelaunch");
}

#[test]
fn events_are_kept_aside_in_order() {
    let qemu = qemu_or_skip!();
    let mut vm = qemu.connect();
    vm.stop(Duration::from_secs(5)).unwrap();
    vm.cont().unwrap();
    let names: Vec<String> = vm.qmp().events().unwrap().into_iter().map(|event| event.name).collect();
    assert_eq!(names.iter().filter(|name| *name != "RTC_CHANGE").collect::<Vec<_>>(), ["STOP", "RESUME"]);
    assert_eq!(vm.qmp().events().unwrap(), []);
}

#[test]
fn a_peer_that_is_no_monitor_is_refused_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let gone = Qmp::connect(&path, Duration::from_secs(1)).unwrap_err();
    assert!(matches!(gone, QmpError::Connect { .. }), "{gone}");

    let listener = UnixListener::bind(&path).unwrap();
    let answer = |bytes: &'static [u8]| {
        let accepted = std::thread::spawn({
            let listener = listener.try_clone().unwrap();
            move || {
                let mut socket = listener.accept().unwrap().0;
                std::io::Write::write_all(&mut socket, bytes).unwrap();
                std::io::Write::flush(&mut socket).unwrap();
            }
        });
        let error = Qmp::connect(&path, Duration::from_secs(5)).unwrap_err();
        accepted.join().unwrap();
        error
    };
    assert!(matches!(answer(b"220 mail ready\r\n"), QmpError::Answer { .. }));
    assert!(matches!(answer(b"{\"hello\": 1}\n"), QmpError::NotQmp { .. }));
    assert!(matches!(answer(b""), QmpError::HungUp { .. }));
    assert!(matches!(answer(b"{\"QMP\": {}}\n"), QmpError::Closed { command: "qmp_capabilities" }));
}

#[test]
fn a_line_without_end_is_refused_before_it_fills_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let flood = std::thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        while std::io::Write::write(&mut socket, &[b'{'; 1 << 16]).is_ok() {}
    });
    let start = Instant::now();
    let error = Qmp::connect(&path, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, QmpError::TooLong { .. }), "{error} after {:?}", start.elapsed());
    flood.join().unwrap();
}
