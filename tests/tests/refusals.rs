//! What can't work is refused before anything is touched, with the value that is wrong and what to type next.

use harness::{Backend, DEADLINE, Finished, Guest, Pair, VmSpec, Whimbrel, or_skip};

const WORKLOAD: &str = "pages=1024 rate=5000";

fn run(arguments: &[&str]) -> Finished {
    Whimbrel::run(arguments, DEADLINE)
}

#[track_caller]
fn refuses(arguments: &[&str], code: i32, words: &[&str]) {
    let ended = run(arguments);
    ended.expect_code(code);
    for word in words {
        assert!(ended.stderr.contains(word), "no {word:?} in {}", ended.stderr);
    }
}

#[test]
fn numbers_without_units_and_addresses_without_a_kind_are_usage_errors() {
    refuses(&["migrate", "tcp:127.0.0.1:1", "--qmp", "x", "--bandwidth", "100"], 2, &["no unit", "2.5Gbit"]);
    refuses(&["migrate", "tcp:127.0.0.1:1", "--qmp", "x", "--max-downtime", "300"], 2, &["300ms"]);
    refuses(&["migrate", "127.0.0.1:1", "--qmp", "x"], 2, &["tcp:"]);
    refuses(&["migrate", "tcp:127.0.0.1:1", "--qmp", "x", "--channels", "0"], 2, &["channels"]);
    refuses(&["migrate", "tcp:127.0.0.1:1", "--qmp", "x", "--packet-size", "5KiB"], 2, &["packet-size"]);
}

#[test]
fn an_address_beyond_this_host_needs_the_operators_word() {
    refuses(&["migrate", "tcp:192.0.2.1:4444", "--qmp", "x"], 2, &["not encrypted", "--insecure"]);
    refuses(&["receive", "tcp:0.0.0.0:0", "--qmp", "x"], 2, &["not encrypted", "--insecure"]);
}

#[test]
fn a_socket_that_is_no_qemu_is_named() {
    refuses(&["migrate", "tcp:127.0.0.1:1", "--qmp", "/nonexistent/qmp"], 1, &["/nonexistent/qmp"]);
}

#[test]
fn a_target_that_does_not_listen_leaves_the_guest_running() {
    let vm = or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).boot());
    let socket = vm.qmp_socket().display().to_string();
    refuses(&["migrate", "tcp:127.0.0.1:1", "--qmp", &socket], 6, &["tcp:127.0.0.1:1", "runs on here"]);
    assert_eq!(vm.traces(), Vec::<String>::new());
    vm.wait_ok();
}

#[test]
fn a_qemu_that_runs_a_guest_is_no_target() {
    let vm = or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).boot());
    let socket = vm.qmp_socket().display().to_string();
    refuses(&["receive", "tcp:127.0.0.1:0", "--qmp", &socket], 3, &["-incoming defer"]);
    vm.wait_ok();
}

#[test]
fn a_target_with_other_memory_is_refused_before_a_page_moves_and_goes_on_listening() {
    let pair = or_skip!(Pair::new(Guest::multiboot(WORKLOAD)).boot());
    let other = or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).ram_mib(96).await_incoming());
    let wrong = Pair { source: pair.source, target: other };
    let (receiver, address) = wrong.start_receiver(&[]);
    for _ in 0..2 {
        let ended = wrong.start_sender(&address, &[]).wait(DEADLINE);
        ended.expect_code(6);
        for word in ["the target refuses", "67108864", "100663296"] {
            assert!(ended.stderr.contains(word), "no {word} in {}", ended.stderr);
        }
    }
    drop(receiver);
    wrong.assert_back_at_source();
}

#[test]
fn a_second_whimbrel_is_kept_away_and_told_who_holds_the_qemu() {
    let pair = or_skip!(Pair::new(Guest::multiboot("pages=4096 rate=5000 fill=random")).boot());
    let (_receiver, address) = pair.start_receiver(&[]);
    let first = pair.start_sender(&address, &["--bandwidth", "50Mbit"]);
    std::thread::sleep(std::time::Duration::from_millis(500));
    let second = pair.start_sender(&address, &[]).wait(DEADLINE);
    second.expect_code(1);
    assert!(second.stderr.contains(&format!("process {}", first.pid())), "{}", second.stderr);
    first.kill();
    pair.assert_back_at_source();
}

#[test]
fn a_stranger_at_the_targets_door_neither_gets_in_nor_ends_it() {
    use std::io::{Read, Write};
    let pair = or_skip!(Pair::new(Guest::multiboot(WORKLOAD)).boot());
    let (receiver, address) = pair.start_receiver(&[]);
    let port = address.strip_prefix("tcp:").unwrap().to_owned();
    let greetings: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        b"WHMB\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff",
        b"QEVM\0\0\0\x03",
        &[0; 4096],
    ];
    let strangers: Vec<_> = greetings
        .iter()
        .map(|greeting| {
            let mut stream = std::net::TcpStream::connect(&port).unwrap();
            stream.write_all(greeting).unwrap();
            stream
        })
        .collect();
    pair.start_sender(&address, &["--verify"]).wait(DEADLINE).expect_code(0);
    receiver.wait(DEADLINE).expect_code(0);
    pair.wait_ok_after_migration();
    for mut stranger in strangers {
        let mut answer = Vec::new();
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.is_empty(), "a stranger was answered: {answer:?}");
    }
}

#[test]
fn a_thousand_strangers_take_up_nothing_once_they_have_left() {
    let pair = or_skip!(Pair::new(Guest::multiboot(WORKLOAD)).boot());
    let (receiver, address) = pair.start_receiver(&[]);
    let port = address.strip_prefix("tcp:").unwrap();
    for _ in 0..1000 {
        // One that is dropped at once because too many are being greeted may be reset.
        drop(std::net::TcpStream::connect(port));
    }
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", receiver.pid())).unwrap().count();
    let few = harness::wait_until(DEADLINE, || (descriptors() < 50).then_some(()));
    assert!(few.is_some(), "{} descriptors are open", descriptors());
    pair.start_sender(&address, &["--verify"]).wait(DEADLINE).expect_code(0);
    receiver.wait(DEADLINE).expect_code(0);
    pair.wait_ok_after_migration();
}

#[test]
fn check_says_ok_for_a_plain_guest_and_names_what_stands_in_the_way() {
    let vm = or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).backend(Backend::Memfd).boot());
    let socket = vm.qmp_socket().display().to_string();
    let ended = run(&["check", "--qmp", &socket]);
    ended.expect_code(0);
    assert!(ended.stdout.lines().count() > 5, "{}", ended.stdout);
    assert!(!ended.stdout.contains("FAIL"), "{}", ended.stdout);
    vm.wait_ok();
}

#[test]
fn a_vm_that_cannot_be_tracked_is_refused_with_the_reason_and_the_fix() {
    let disk = or_skip!(harness::Disk::stamped(4));
    let vm = or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).disk(disk).boot());
    let nodes = vm.execute("query-named-block-nodes", serde_json::json!({ "flat": true }));
    let node = nodes[0]["node-name"].as_str().unwrap().to_owned();
    vm.execute("block-dirty-bitmap-add", serde_json::json!({ "node": node, "name": "backup" }));
    let socket = vm.qmp_socket().display().to_string();
    for command in [&["check"][..], &["migrate", "tcp:127.0.0.1:1"]] {
        let ended = run(&[command, &["--qmp", &socket]].concat());
        ended.expect_code(3);
        let said = ended.stdout + &ended.stderr;
        assert!(said.contains("FAIL") && said.contains("bitmap") && said.contains("fix:"), "{said}");
    }
    assert_eq!(vm.traces(), Vec::<String>::new());
    vm.wait_ok();
}
