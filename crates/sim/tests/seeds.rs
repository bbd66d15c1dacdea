//! Runs that are drawn from a seed, faults and all. `WHIMBREL_SEEDS=n` runs so many, from `WHIMBREL_FIRST` on;
//! `WHIMBREL_SEED=n` replays one and prints its log.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;
use whimbrel_sim::{Pair, Plan, Seed};

#[test]
fn no_promise_is_broken_whatever_goes_wrong() {
    if let Some(seed) = number("WHIMBREL_SEED") {
        return replay(Seed(seed));
    }
    let (first, count) = (number("WHIMBREL_FIRST").unwrap_or(0), number("WHIMBREL_SEEDS").unwrap_or(SEEDS));
    let began = Instant::now();
    let failures = (first..first + count).filter_map(|seed| Some((seed, failure(Plan::drawn(Seed(seed)))?)));
    let failures: Vec<_> =
        failures.inspect(|(seed, failure)| println!("seed {seed}: {failure}")).take(20).collect();
    println!("{count} seeds in {:.1} s", began.elapsed().as_secs_f64());
    assert!(
        failures.is_empty(),
        "seeds {:?} fail; replay one by WHIMBREL_SEED=n cargo test -p whimbrel-sim --test seeds -- --nocapture",
        failures.iter().map(|(seed, _)| seed).collect::<Vec<_>>()
    );
}

#[test]
fn a_seed_gives_the_same_run_every_time() {
    for seed in 0..50 {
        let log = || {
            let mut pair = Pair::planned(Plan::drawn(Seed(seed)));
            pair.run();
            pair.log()
        };
        assert_eq!(log(), log(), "seed {seed}");
    }
}

/// What is wrong with a run, if anything. A panic of the code under test counts.
fn failure(plan: Plan) -> Option<String> {
    let mut pair = Pair::planned(plan);
    match catch_unwind(AssertUnwindSafe(|| pair.try_run())) {
        Ok(Ok(())) => None,
        Ok(Err(violation)) => Some(format!("{violation:?}")),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Some(format!("panicked: {}", text.unwrap_or("with something odd")))
        }
    }
}

fn replay(seed: Seed) {
    let plan = Plan::drawn(seed);
    println!("{plan:#?}");
    let mut pair = Pair::planned(plan);
    let ran = catch_unwind(AssertUnwindSafe(|| pair.try_run()));
    println!("{}\n{ran:?}", pair.log());
    assert!(matches!(ran, Ok(Ok(()))), "{seed:?} fails");
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// Some ten seconds on one core.
const SEEDS: u64 = 5000;
