//! A running guest is moved, unharmed, whatever its memory is made of.

use harness::{Accel, Backend, Guest, Pair, PairSpec, or_skip};

/// Small enough for a busy machine, and always writing: one lap takes about 0.2 s.
const WORKLOAD: &str = "pages=4096 rate=20000";

fn pair() -> PairSpec {
    Pair::new(Guest::multiboot(WORKLOAD))
}

#[track_caller]
fn moves(spec: &PairSpec, arguments: &[&str]) -> Option<(Pair, serde_json::Value)> {
    let pair = or_skip_none(spec)?;
    let result = pair.migrate(arguments).expect_done();
    assert_eq!(result["status"], "completed", "{result}");
    assert_eq!(result["whimbrel"]["owner"], "target", "{result}");
    pair.wait_ok_after_migration();
    pair.assert_at_target();
    Some((pair, result))
}

#[track_caller]
fn or_skip_none(spec: &PairSpec) -> Option<Pair> {
    match spec.boot() {
        Ok(pair) => Some(pair),
        Err(harness::Error::Missing(missing)) => {
            harness::skip(&missing.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_guest_on_default_memory_is_moved() {
    moves(&pair().backend(Backend::Default), &["--channels", "4", "--verify"]);
}

#[test]
fn a_guest_on_a_named_private_memory_is_moved() {
    moves(&pair().backend(Backend::Ram), &["--verify"]);
}

#[test]
fn a_guest_on_shared_anonymous_memory_is_moved() {
    moves(&pair().backend(Backend::RamShared), &["--verify"]);
}

#[test]
fn a_guest_on_a_memfd_is_moved() {
    moves(&pair().backend(Backend::Memfd), &["--channels", "4", "--verify"]);
}

#[test]
fn a_guest_on_a_tmpfs_file_is_moved() {
    moves(&pair().backend(Backend::File), &["--verify"]);
}

#[test]
fn a_guest_on_a_private_mapping_of_a_file_is_moved() {
    moves(&pair().backend(Backend::FilePrivate), &["--verify"]);
}

#[test]
fn a_guest_on_a_disk_file_is_moved() {
    moves(&pair().backend(Backend::FileOnDisk), &["--verify"]);
}

#[test]
fn a_guest_on_huge_pages_is_moved() {
    moves(&pair().backend(Backend::Hugetlb), &["--verify"]);
}

#[test]
fn a_guest_under_kvm_is_moved_from_every_kind_of_memory() {
    for backend in [Backend::Default, Backend::Memfd, Backend::Hugetlb] {
        moves(&pair().accel(Accel::Kvm).backend(backend), &["--channels", "3", "--verify"]);
    }
}

#[test]
fn the_ends_may_keep_their_memory_in_different_ways() {
    moves(&pair().backend(Backend::Default).target_backend(Backend::File), &["--verify"]);
    moves(&pair().backend(Backend::Memfd).target_backend(Backend::Default), &["--verify"]);
}

#[test]
fn every_mode_of_zero_page_detection_moves_the_same_guest() {
    let spec = Pair::new(Guest::multiboot("pages=4096 rate=20000 fill=half")).backend(Backend::Memfd);
    for mode in ["none", "legacy", "multifd"] {
        let Some((_, result)) = moves(&spec, &["--zero-page-detection", mode, "--channels", "3", "--verify"])
        else {
            return;
        };
        let duplicate = result["ram"]["duplicate"].as_u64().unwrap();
        // Some firmware pages were never touched; they count as zero without being looked for.
        match mode {
            "none" => assert!(duplicate < 500, "{duplicate} zero pages though nobody looks for them"),
            _ => assert!(duplicate > 2000, "only {duplicate} zero pages of a half-filled guest"),
        }
    }
}

#[test]
fn a_share_of_zero_pages_goes_in_full_when_asked() {
    let spec = Pair::new(Guest::multiboot("pages=1024 rate=5000 fill=zero")).backend(Backend::Memfd);
    let duplicate = |ratio: &str| {
        let (_, result) = moves(&spec, &["--normal-page-ratio", ratio, "--verify"])?;
        result["ram"]["duplicate"].as_u64()
    };
    let (Some(none), Some(half), Some(all)) = (duplicate("0"), duplicate("50"), duplicate("100")) else {
        return;
    };
    assert!(none > 8000 && half * 10 > none * 4 && half * 10 < none * 6, "{none} zero pages, then {half}");
    assert!(all < 500, "{all} zero pages though all should go in full");
}

#[test]
fn pages_that_turn_zero_and_back_on_the_way_arrive_as_they_are() {
    for backend in [Backend::Default, Backend::Memfd] {
        let spec = Pair::new(Guest::multiboot("pages=8192 rate=100000 zero=1")).backend(backend);
        moves(
            &spec,
            &[
                "--channels",
                "4",
                "--bandwidth",
                "200Mbit",
                "--timeout",
                "2s",
                "--timeout-action",
                "switchover",
                "--verify",
            ],
        );
    }
}

#[test]
fn packets_of_every_size_carry_a_guest() {
    for size in ["4KiB", "64KiB", "8MiB"] {
        moves(&pair(), &["--packet-size", size, "--channels", "2", "--verify"]);
    }
}

#[test]
fn many_channels_carry_a_small_guest() {
    moves(&pair(), &["--channels", "40", "--verify"]);
}

#[test]
fn untouched_memory_is_never_read_and_the_target_stays_as_sparse() {
    for backend in [Backend::Default, Backend::Memfd] {
        let spec = Pair::new(Guest::multiboot("pages=1024 rate=5000")).ram_mib(2048).backend(backend);
        let Some(pair) = or_skip_none(&spec) else { return };
        let before = pair.source.resident_bytes();
        let result = pair.migrate(&["--verify", "--keep-source"]).expect_done();
        let (source, target) = (pair.source.resident_bytes(), pair.target.resident_bytes());
        assert!(source < before + (16 << 20), "{backend:?}: the source grew from {before} to {source} bytes");
        assert!(target < before + (32 << 20), "{backend:?}: {before} bytes became {target} at the target");
        let skipped = result["whimbrel"]["holes-skipped"].as_u64().unwrap() * 4096;
        assert!(skipped > 1900 << 20, "only {skipped} bytes skipped");
        pair.wait_ok_after_migration();
    }
}

#[test]
fn the_target_waits_for_commit_whether_it_was_started_paused_or_not() {
    for spec in [pair(), pair().target_arg("-S")] {
        let Some(pair) = or_skip_none(&spec) else { return };
        let (receiver, address) = pair.start_receiver(&[]);
        assert_eq!(pair.target.state(), "inmigrate");
        pair.start_sender(&address, &["--verify"]).wait(harness::DEADLINE).expect_code(0);
        receiver.wait(harness::DEADLINE).expect_code(0);
        // A heartbeat that both ends printed would be harm.
        pair.wait_ok_after_migration();
    }
}

#[test]
fn a_paused_guest_arrives_paused_and_can_be_run_there() {
    let pair = or_skip!(pair().boot());
    pair.source.pause();
    pair.migrate(&["--verify"]).expect_done();
    assert_eq!(pair.target.state(), "paused");
    pair.target.resume();
    pair.wait_ok_after_migration();
}

#[test]
fn a_source_that_is_kept_stays_paused() {
    let pair = or_skip!(pair().boot());
    pair.migrate(&["--keep-source"]).expect_done();
    assert_eq!(pair.source.state(), "paused");
    assert_eq!(pair.source.traces(), Vec::<String>::new());
    pair.wait_ok_after_migration();
}

#[test]
fn a_source_that_is_not_kept_has_ended() {
    let mut pair = or_skip!(pair().boot());
    pair.migrate(&[]).expect_done();
    assert!(pair.source.wait_exit(harness::DEADLINE).success());
}

#[test]
fn linux_with_redis_is_moved() {
    let guest = Guest::linux(&["memcheck", "redis"], "rate=20000");
    moves(
        &Pair::new(guest).backend(Backend::Memfd),
        &["--channels", "4", "--max-downtime", "1s", "--verify"],
    );
}

#[test]
fn a_bandwidth_is_kept_to() {
    let spec = Pair::new(Guest::multiboot("pages=1024 rate=1000 fill=random"));
    let Some((_, result)) = moves(&spec, &["--bandwidth", "400Mbit"]) else { return };
    let sent = result["ram"]["transferred"].as_f64().unwrap();
    let seconds = result["total-time"].as_f64().unwrap() / 1000.0;
    let mbit = sent * 8e-6 / seconds;
    assert!(mbit < 420.0, "{mbit:.0} Mbit/s where 400 were allowed");
}

#[test]
fn both_kinds_of_sockets_and_addresses_carry_a_guest() {
    let directory = tempfile::tempdir().unwrap();
    let unix = format!("unix:{}", directory.path().join("whimbrel.sock").display());
    for listen in ["tcp:[::1]:0", "tcp:localhost:0", &unix] {
        let pair = or_skip!(pair().boot());
        let socket = pair.target.qmp_socket().display().to_string();
        let mut receiver = harness::Whimbrel::start(&["receive", listen, "--qmp", &socket]);
        let line = receiver.wait_line("listening on ", harness::DEADLINE);
        let address = line.strip_prefix("listening on ").unwrap().to_owned();
        pair.start_sender(&address, &["--verify"]).wait(harness::DEADLINE).expect_code(0);
        receiver.wait(harness::DEADLINE).expect_code(0);
        pair.wait_ok_after_migration();
    }
}

#[test]
fn a_guest_survives_being_moved_to_and_fro() {
    let spec = pair().backend(Backend::Memfd);
    let Some((pair, _)) = moves(&spec, &[]) else { return };
    let mut here = pair.target;
    for _ in 0..4 {
        let next = Pair { source: here, target: or_skip!(spec.await_incoming()) };
        next.migrate(&["--verify"]).expect_done();
        next.assert_at_target();
        next.target.wait_ok();
        here = next.target;
    }
}
