//! Writers that page tables don't show: direct I/O in flight, and discards. Each rule has the test that it holds,
//! and the test of the test: without the rule the digests of the two ends differ.

use harness::{Aio, Backend, Cache, DEADLINE, Disk, Finished, Guest, Pair, PairSpec, or_skip};

/// Reads of 1 MiB that stay under way in the host's kernel for seconds, over many scans.
fn slow_direct_reads(aio: Aio) -> Result<PairSpec, harness::Error> {
    let disk = Disk::stamped(64)?.cache(Cache::None).aio(aio).slow_device(8 << 20);
    let guest = Guest::linux(&["diocheck"], "readers=8 buffers=4 chunk_kib=1024");
    Ok(Pair::new(guest).backend(Backend::Memfd).disk(disk))
}

/// Slow enough that reads begin and end in many rounds. The 8 MiB that the guest asks for again after each stop
/// take 84 ms to send.
const MANY_ROUNDS: [&str; 4] = ["--bandwidth", "800Mbit", "--max-downtime", "300ms"];

#[track_caller]
fn migrate_without(rule: &str, pair: &Pair, arguments: &[&str]) -> Finished {
    let (receiver, address) = pair.start_receiver(&[]);
    let arguments = [&["--verify"], arguments].concat();
    let sender = pair.start_sender_without(rule, &address, &arguments);
    let ended = sender.wait(3 * DEADLINE);
    // Shown if the test fails.
    println!("{:?}", receiver.wait(DEADLINE));
    ended
}

#[test]
fn direct_reads_in_flight_are_not_lost() {
    for aio in [Aio::Threads, Aio::Native, Aio::IoUring] {
        let spec = or_skip!(slow_direct_reads(aio));
        let pair = or_skip!(spec.boot());
        let ended = migrate_without("", &pair, &MANY_ROUNDS);
        ended.expect_code(0);
        let stops = ended.json()["whimbrel"]["barriers"].as_u64().unwrap();
        assert!(stops >= 2, "{stops} quiesced scans");
        pair.wait_ok_after_migration();
    }
}

#[test]
fn direct_reads_in_flight_would_be_lost_without_the_rule() {
    // Whether a read is under way at a scan is chance; three chances are enough.
    let lost = (0..3).any(|_| {
        // What the machine lacks is told by the test above.
        let Ok(spec) = slow_direct_reads(Aio::Threads) else { return true };
        let Ok(pair) = spec.boot() else { return true };
        migrate_without("no-direct-io-rule", &pair, &MANY_ROUNDS).stderr.contains("RAM differs")
    });
    assert!(lost, "three migrations without the rule lost nothing: the test above proves nothing");
}

/// The guest has just given memory back; the host discards it about two seconds later, in the middle of a round
/// that takes longer.
#[track_caller]
fn amid_discards(backend: Backend) -> Result<Pair, harness::Error> {
    let guest = Guest::linux(&["discardcheck"], "discard_mib=96");
    let pair = Pair::new(guest).backend(backend).balloon().boot()?;
    pair.source.wait_line("gave back round=2");
    Ok(pair)
}

const LONG_ROUND: [&str; 4] = ["--bandwidth", "300Mbit", "--max-downtime", "100ms"];

#[test]
fn discarded_memory_arrives_as_zero_and_sparse() {
    for backend in [Backend::Default, Backend::Memfd, Backend::File] {
        let pair = or_skip!(amid_discards(backend));
        let ended = migrate_without("", &pair, &LONG_ROUND);
        ended.expect_code(0);
        pair.wait_ok_after_migration();
    }
}

#[test]
fn discards_would_be_missed_without_the_rule() {
    let missed = (0..3).any(|_| {
        // What the machine lacks is told by the test above.
        let Ok(pair) = amid_discards(Backend::Memfd) else { return true };
        migrate_without("no-discard-rule", &pair, &LONG_ROUND).stderr.contains("RAM differs")
    });
    assert!(missed, "three migrations without the rule missed nothing: the test above proves nothing");
}
