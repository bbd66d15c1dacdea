//! Whole migrations inside one process, over real sockets, of a guest that keeps writing.

use channel::Listener;
use engine::{Outcome, Owner, TargetOutcome, ZeroPageDetection};
use migrate::{Note, StartError, Status, TargetVm, Trouble, source, target};
use std::num::NonZeroU64;
use std::thread;
use std::time::{Duration, Instant};
use whimbrel_guest::{Guest, Shape};
use wire::{Format, Session};

#[test]
fn a_guest_that_keeps_writing_loses_nothing_by_its_move() {
    for seed in 0..8 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (shape, setup) = drawn(&mut random);
        let here = Guest::boot(shape).unwrap();
        wait_for_laps(&here, random.u64(1..3));
        let there = Guest::await_incoming(shape).unwrap();
        let moved = run(&here, setup, there.target_setup());

        assert_eq!(moved.outcome.owner, Owner::Target, "seed {seed}: {:?}", moved.outcome);
        assert_eq!(moved.target, TargetOutcome::Running, "seed {seed}");
        assert!(!here.is_running() && there.is_running(), "seed {seed}");
        assert!(there.health().visits >= here.health().visits, "seed {seed}: it does not go on from there");
        wait_for_laps(&there, 2);
        assert_eq!(there.health().lost, 0, "seed {seed}");
    }
}

#[test]
fn pages_that_were_never_touched_are_not_sent_and_zeros_travel_as_such() {
    let shape = Shape { ram_bytes: 64 << 20, working_bytes: 4 << 20, vcpus: 1, visits_per_second: 1000 };
    let here = Guest::boot(shape).unwrap();
    here.pause();
    let there = Guest::await_incoming(shape).unwrap();
    let status = run(&here, |setup| source::Setup { verify: true, ..setup }, there.target_setup()).status;

    assert_eq!(status.whimbrel.holes_skipped, (60 << 20) / 4096);
    assert!((200..300).contains(&status.ram.duplicate), "a quarter of 1024 pages: {}", status.ram.duplicate);
    assert!(!there.is_running(), "it was paused at the source");
    there.resume().unwrap();
    wait_for_laps(&there, 2);
    assert_eq!(there.health().lost, 0);
}

#[test]
fn a_target_of_another_size_leaves_the_guest_running_at_the_source() {
    let here = Guest::boot(SMALL).unwrap();
    let there = Guest::await_incoming(Shape { ram_bytes: 16 << 20, ..SMALL }).unwrap();
    let receiving = there.target_setup();
    let inbox = receiving.inbox.clone();
    let refused = run(
        &here,
        move |setup| {
            // A target goes on listening after a refusal.
            let after = move || inbox.put(Note::Cancel);
            thread::spawn(move || (thread::sleep(Duration::from_millis(500)), after()));
            setup
        },
        receiving,
    );
    assert_runs_on(&here, &refused.outcome, "guest.ram has 8388608 bytes at the source and 16777216");
    assert!(!there.is_running());
}

#[test]
fn a_target_that_ends_in_precopy_leaves_the_guest_running_at_the_source() {
    let here = Guest::boot(SMALL).unwrap();
    let there = Guest::await_incoming(SMALL).unwrap();
    let receiving = there.target_setup();
    let (inbox, counters) = (receiving.inbox.clone(), receiving.status.clone());
    thread::spawn(move || {
        while counters.lock().unwrap().ram.normal == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        inbox.put(Note::Cancel);
    });
    let slow = |setup| source::Setup { bandwidth: NonZeroU64::new(1 << 20), ..setup };
    let dropped = run(&here, slow, receiving);
    assert_runs_on(&here, &dropped.outcome, "ended by the operator");
    assert!(!there.is_running());
}

#[test]
fn a_target_that_cannot_load_the_state_gives_the_stopped_guest_back() {
    let here = Guest::boot(SMALL).unwrap();
    let there = Guest::await_incoming(SMALL).unwrap();
    let setup = there.target_setup();
    let receiving = target::Setup { vm: Box::new(Unable(setup.vm)), ..setup };
    let failed = run(&here, |setup| setup, receiving);
    assert_runs_on(&here, &failed.outcome, "no such device");
    assert!(failed.status.whimbrel.predicted_downtime.is_some(), "the guest was stopped");
    assert!(!there.is_running());
}

const SMALL: Shape =
    Shape { ram_bytes: 8 << 20, vcpus: 2, working_bytes: 4 << 20, visits_per_second: 20_000 };

struct Moved {
    outcome: Outcome,
    target: TargetOutcome,
    status: Status,
}

/// Moves a guest; `change` has the last word about how.
fn run(here: &Guest, change: impl FnOnce(source::Setup) -> source::Setup, receiving: target::Setup) -> Moved {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address().clone();
    let target = thread::spawn(move || target::run(&listener, receiving).outcome);
    let setup = change(here.source_setup(address, Session([7; 16])));
    let status = setup.status.clone();
    let (outcome, _) = source::run(setup);
    let status = status.lock().unwrap().clone();
    Moved { outcome, target: target.join().unwrap(), status }
}

/// A guest and a way to move it, of a seed.
fn drawn(random: &mut fastrand::Rng) -> (Shape, impl FnOnce(source::Setup) -> source::Setup + use<>) {
    let shape = Shape {
        ram_bytes: 32 << 20,
        vcpus: random.u32(1..=3),
        working_bytes: random.u64(2..=16) << 20,
        visits_per_second: random.u32(5_000..=50_000),
    };
    let modes = [ZeroPageDetection::None, ZeroPageDetection::Legacy, ZeroPageDetection::Multifd];
    let (channels, detection) = (random.u8(1..=6), modes[random.usize(..3)]);
    let format = Format::new(4096 << random.u32(0..=8)).unwrap();
    let (verify, normal_page_ratio) = (random.bool(), random.u8(..=100));
    let change =
        move |setup| source::Setup { channels, detection, format, verify, normal_page_ratio, ..setup };
    (shape, change)
}

#[track_caller]
fn assert_runs_on(here: &Guest, outcome: &Outcome, reason: &str) {
    assert_eq!(outcome.owner, Owner::Source);
    let told = outcome.failure.as_ref().expect("a reason").reason();
    assert!(told.contains(reason), "{told}");
    assert!(here.is_running());
    wait_for_laps(here, 2);
    assert_eq!(here.health().lost, 0);
}

/// Waits until every page was checked this many times more.
#[track_caller]
fn wait_for_laps(guest: &Guest, laps: u64) {
    // The lap under way does not count.
    let (end, enough) = (Instant::now() + Duration::from_secs(30), guest.health().laps + laps + 1);
    while guest.health().laps < enough {
        assert!(Instant::now() < end, "the guest hangs: {:?}", guest.health());
        thread::sleep(Duration::from_millis(5));
    }
}

/// A target whose devices are others.
struct Unable(Box<dyn TargetVm>);

impl TargetVm for Unable {
    fn load(&mut self, _: &[u8]) -> Result<(), Trouble> {
        Err("no such device".into())
    }

    fn record_commit(&mut self) -> Result<(), Trouble> {
        self.0.record_commit()
    }

    fn start(&mut self) -> Result<(), StartError> {
        self.0.start()
    }

    fn end(&mut self) -> Result<(), Trouble> {
        self.0.end()
    }
}
