//! The source's decisions: rounds, the stop, the hand-over, and what to undo when something fails.
//!
//! Invariant: the guest is resumed by the source only before *commit* was written, or after the target said that
//! it will never run it. Every path below ends in an [`Outcome`] that names who owns the VM.

use crate::{Action, Event, Failure, Forecast, Limits, Outcome, Owner, Parts, Phase, TimeoutAction};
use std::time::Duration;

/// The source's end of a migration.
#[derive(Debug)]
pub struct Source {
    limits: Limits,
    phase: Phase,
    step: Step,
    forecast: Forecast,
    pending_pages: u64,
    previous_pages: u64,
    /// Whether the last scan was done with direct I/O drained; always true where there is none.
    quiesced: bool,
    rounds: u64,
    small_rounds: u32,
    published_at: Duration,
    parts: Parts,
    asked: bool,
    failure: Option<Failure>,
    cancelled: bool,
}

/// Fine steps where one event means different things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Precopy,
    /// The stop has come; the pages of the last scan are on their way, the device state is not saved.
    LastPages,
    /// The device state is saved; what saving wrote is being collected and sent.
    AfterSave,
}

impl Source {
    /// A migration that has not begun.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            phase: Phase::Setup,
            step: Step::Precopy,
            forecast: Forecast::default(),
            pending_pages: 0,
            previous_pages: u64::MAX,
            quiesced: !limits.direct_io,
            rounds: 0,
            small_rounds: 0,
            published_at: Duration::ZERO,
            parts: Parts::default(),
            asked: false,
            failure: None,
            cancelled: false,
        }
    }

    /// The first thing to do.
    pub fn start(&self) -> Action {
        Action::Greet
    }

    /// Where it stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Rounds whose pages were all sent; the one after the stop counts.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// What a stop would cost now, or, once stopped, what it was expected to cost.
    pub fn expected_downtime(&self) -> Parts {
        self.parts
    }

    /// The rates learned so far.
    pub fn forecast(&mut self) -> &mut Forecast {
        &mut self.forecast
    }

    /// Whether a cancel is still possible: until *commit*.
    pub fn can_cancel(&self) -> bool {
        matches!(self.phase, Phase::Setup | Phase::Active | Phase::Device)
    }

    /// Takes what happened at `now` (since the start) and tells the one thing to do next.
    pub fn on(&mut self, event: Event, now: Duration) -> Action {
        match event {
            Event::Failed(failure) => self.fail(failure),
            Event::FailedQuiesced(failure) => {
                self.failure.get_or_insert(failure);
                self.resume()
            }
            Event::Cancelled => self.cancel(),
            Event::Accepted => Action::Arm { quiesced: self.limits.direct_io },
            Event::Armed { pages } => {
                self.phase = Phase::Active;
                self.pending_pages = pages;
                self.publish(now)
            }
            Event::Published if self.step == Step::LastPages => Action::Save,
            Event::Published => Action::Flush,
            Event::Flushed { pages } => self.flushed(pages, now),
            Event::Collected { pages } => self.collected(pages, now),
            Event::Stopped => Action::Collect { quiesced: false },
            Event::Saved => Action::Flush,
            Event::Finished => Action::AwaitReady,
            Event::Ready => Action::Commit,
            Event::Committed => {
                self.phase = Phase::Committed;
                Action::AwaitRunning
            }
            Event::CommitUnsure(reason) => {
                self.phase = Phase::Committed;
                self.fail(Failure::Here(reason))
            }
            Event::Running => Action::Retire,
            Event::NeverRuns => {
                self.failure.get_or_insert(Failure::Peer(GIVEN_BACK.into()));
                self.resume()
            }
            Event::Retired => self.end(Owner::Target),
            Event::Resumed => self.end(Owner::Source),
            Event::NotResumed(reason) => {
                let before = self.failure.take().map(|failure| format!("{}; then: ", failure.reason()));
                self.failure = Some(Failure::Here(before.unwrap_or_default() + &reason));
                self.end(Owner::SourceStopped)
            }
        }
    }

    fn publish(&mut self, now: Duration) -> Action {
        self.published_at = now;
        Action::Publish
    }

    fn flushed(&mut self, data_pages: u64, now: Duration) -> Action {
        self.forecast.learn(data_pages, now.saturating_sub(self.published_at));
        self.rounds += 1;
        self.previous_pages = self.pending_pages;
        self.pending_pages = 0;
        match self.step {
            Step::Precopy => Action::Collect { quiesced: self.quiesced && self.limits.direct_io },
            Step::LastPages => {
                self.step = Step::AfterSave;
                Action::Collect { quiesced: false }
            }
            Step::AfterSave => Action::Finish,
        }
    }

    fn collected(&mut self, pages: u64, now: Duration) -> Action {
        self.pending_pages = pages;
        match self.step {
            Step::AfterSave if pages == 0 => Action::Finish,
            Step::LastPages | Step::AfterSave => self.publish(now),
            Step::Precopy => self.next_round(now),
        }
    }

    /// With direct I/O about, a stop is preceded by a quiesced scan, so that what plain scans may have missed is
    /// sent while the guest runs. `quiesced` asks for it as soon as a stop would fit.
    fn next_round(&mut self, now: Duration) -> Action {
        self.parts = self.forecast.downtime(self.pending_pages);
        let fits = self.fits(self.parts);
        let scanned_quiesced = std::mem::replace(&mut self.quiesced, fits || !self.limits.direct_io);
        if fits && scanned_quiesced && !self.pays_to_go_on() {
            return self.stop();
        }
        match (self.limits.timeout, self.limits.timeout_action) {
            (Some(timeout), TimeoutAction::Switchover) if now >= timeout => self.stop(),
            (Some(timeout), TimeoutAction::Fail) if now >= timeout => {
                self.fail(Failure::NotConverging(self.verdict(now)))
            }
            _ => self.publish(now),
        }
    }

    /// Whether a stop would keep to the limit. A limit below what every stop costs can't be kept; then it bounds
    /// what more rounds can still make shorter, which is sending RAM.
    fn fits(&self, parts: Parts) -> bool {
        let fixed = parts.devices + parts.round_trips;
        let ram_max = self.limits.downtime_max.checked_sub(fixed).unwrap_or(self.limits.downtime_max);
        parts.ram <= ram_max
    }

    /// Another round is worth its time while it makes a stop clearly shorter: while sending what is left is not
    /// small beside the rest of the stop, and while rounds still shrink by a quarter or more.
    fn pays_to_go_on(&mut self) -> bool {
        let shrinks = self.pending_pages < self.previous_pages - self.previous_pages / 4;
        let matters = self.parts.ram * 4 > self.parts.devices + self.parts.round_trips;
        self.small_rounds += 1;
        matters && shrinks && self.small_rounds <= SMALL_ROUNDS_MAX
    }

    fn verdict(&self, now: Duration) -> String {
        format!(
            "after {:.1} s and {} rounds {} pages are left, which would stop the guest for {} ms; the limit is {} ms",
            now.as_secs_f64(),
            self.rounds,
            self.pending_pages,
            self.parts.total().as_millis(),
            self.limits.downtime_max.as_millis(),
        )
    }

    fn stop(&mut self) -> Action {
        self.phase = Phase::Device;
        self.step = Step::LastPages;
        Action::Stop
    }

    fn cancel(&mut self) -> Action {
        self.cancelled = true;
        match self.phase {
            Phase::Setup | Phase::Active => self.end(Owner::Source),
            Phase::Device => self.resume(),
            Phase::Committed | Phase::Resuming | Phase::Ended => {
                unreachable!("a cancel after commit is refused where it comes in")
            }
        }
    }

    fn fail(&mut self, failure: Failure) -> Action {
        self.failure.get_or_insert(failure);
        match self.phase {
            Phase::Setup | Phase::Active => self.end(Owner::Source),
            Phase::Device => self.resume(),
            Phase::Committed if !self.asked => {
                self.asked = true;
                Action::Ask
            }
            Phase::Committed => self.end(Owner::InDoubt),
            Phase::Resuming => self.end(Owner::SourceStopped),
            Phase::Ended => unreachable!("nothing is done after the end"),
        }
    }

    fn resume(&mut self) -> Action {
        self.phase = Phase::Resuming;
        Action::Resume
    }

    fn end(&mut self, owner: Owner) -> Action {
        self.phase = Phase::Ended;
        let failure = if owner == Owner::Target { None } else { self.failure.take() };
        Action::End(Outcome { owner, failure, cancelled: self.cancelled && owner != Owner::Target })
    }
}

const GIVEN_BACK: &str = "the target could not run the guest and gave it back; its own whimbrel says why";

/// Rounds that are sent although a stop would already keep to the limit.
const SMALL_ROUNDS_MAX: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn active(limits: Limits, pages: u64) -> Source {
        let mut source = Source::new(limits);
        source.on(Event::Accepted, MS);
        assert_eq!(source.on(Event::Armed { pages }, MS), Action::Publish);
        source
    }

    /// Sends what is pending at 100,000 pages a second, then collects `dirty` pages.
    fn round(source: &mut Source, now: &mut Duration, dirty: u64) -> Action {
        assert_eq!(source.on(Event::Published, *now), Action::Flush);
        let pages = source.pending_pages;
        *now += Duration::from_micros(10 * pages);
        let next = source.on(Event::Flushed { pages }, *now);
        assert!(matches!(next, Action::Collect { .. }), "{next:?}");
        source.on(Event::Collected { pages: dirty }, *now)
    }

    #[test]
    fn the_guest_is_stopped_when_the_rest_fits_the_limit_and_rounds_shrink_no_more() {
        let mut source = active(Limits::default(), 1_000_000);
        let mut now = MS;
        assert_eq!(round(&mut source, &mut now, 100_000), Action::Publish, "1 s is left");
        assert_eq!(round(&mut source, &mut now, 10_000), Action::Publish, "100 ms, but it shrinks fast");
        assert_eq!(round(&mut source, &mut now, 9_500), Action::Stop, "95 ms and hardly less than before");
    }

    #[test]
    fn a_limit_below_what_every_stop_costs_still_ends() {
        let mut source = active(Limits { downtime_max: 5 * MS, ..Limits::default() }, 100_000);
        source.forecast().learn_round_trip(100 * MS);
        let mut now = MS;
        assert_eq!(round(&mut source, &mut now, 10_000), Action::Publish, "100 ms of RAM can be made less");
        assert_eq!(round(&mut source, &mut now, 400), Action::Stop, "4 ms of RAM, the rest is fixed");
    }

    #[test]
    fn a_guest_that_writes_faster_than_the_link_is_not_stopped_without_a_timeout() {
        let mut source = active(Limits::default(), 100_000);
        let mut now = MS;
        for _ in 0..100 {
            assert_eq!(round(&mut source, &mut now, 100_000), Action::Publish);
        }
    }

    #[test]
    fn a_timeout_fails_with_numbers_or_stops_as_asked() {
        let timeout = Some(Duration::from_secs(3));
        for (timeout_action, stops) in [(TimeoutAction::Fail, false), (TimeoutAction::Switchover, true)] {
            let limits = Limits { timeout, timeout_action, ..Limits::default() };
            let mut source = active(limits, 100_000);
            let mut now = MS;
            let mut action = Action::Publish;
            while action == Action::Publish {
                action = round(&mut source, &mut now, 100_000);
            }
            assert_eq!(action == Action::Stop, stops, "{action:?}");
            if let Action::End(outcome) = action {
                assert_eq!(outcome.owner, Owner::Source);
                assert!(matches!(outcome.failure, Some(Failure::NotConverging(_))));
            }
        }
    }

    #[test]
    fn direct_io_gets_a_quiesced_scan_before_the_stop() {
        let mut source = active(Limits { direct_io: true, ..Limits::default() }, 100_000);
        let mut now = MS;
        assert_eq!(
            round(&mut source, &mut now, 50),
            Action::Publish,
            "it fits, but the scan was a plain one"
        );
        source.on(Event::Published, now);
        assert_eq!(source.on(Event::Flushed { pages: 50 }, now), Action::Collect { quiesced: true });
        assert_eq!(source.on(Event::Collected { pages: 60 }, now), Action::Stop);
    }

    #[test]
    fn an_unanswered_commit_is_asked_about_once_and_then_left_in_doubt() {
        let mut source = active(Limits::default(), 1);
        for event in [Event::Stopped, Event::Saved, Event::Finished, Event::Ready, Event::Committed] {
            source.on(event, MS);
        }
        let lost = || Event::Failed(Failure::Peer("cut".into()));
        assert_eq!(source.on(lost(), MS), Action::Ask);
        let Action::End(outcome) = source.on(lost(), MS) else { panic!("an end") };
        assert_eq!(outcome.owner, Owner::InDoubt);
    }

    #[test]
    fn a_quiesced_moment_that_failed_may_have_left_the_guest_stopped() {
        let mut source = active(Limits { direct_io: true, ..Limits::default() }, 1);
        let failure = Failure::Here("stop: no answer".into());
        assert_eq!(source.on(Event::FailedQuiesced(failure.clone()), MS), Action::Resume);
        let outcome = Outcome { owner: Owner::Source, failure: Some(failure), cancelled: false };
        assert_eq!(source.on(Event::Resumed, MS), Action::End(outcome));
    }

    #[test]
    fn a_guest_that_cannot_be_resumed_is_told_of_with_what_led_to_it() {
        let mut source = active(Limits::default(), 1);
        source.on(Event::FailedQuiesced(Failure::Here("first".into())), MS);
        let Action::End(outcome) = source.on(Event::NotResumed("second".into()), MS) else {
            panic!("an end")
        };
        assert_eq!(outcome.owner, Owner::SourceStopped);
        assert_eq!(outcome.failure.unwrap().reason(), "first; then: second");
    }

    /// Does what the source asks, as `dice` decide: it succeeds, fails or is cancelled.
    fn play(dice: &[u8], limits: Limits) -> (Vec<Action>, Outcome) {
        let mut source = Source::new(limits);
        let mut action = source.start();
        let mut done = vec![];
        for (at, die) in dice.iter().cycle().enumerate() {
            done.push(action.clone());
            if let Action::End(outcome) = action {
                return (done, outcome);
            }
            let now = Duration::from_millis(10 * at as u64);
            action = source.on(answer(&action, *die, source.can_cancel()), now);
        }
        unreachable!()
    }

    fn answer(action: &Action, die: u8, can_cancel: bool) -> Event {
        let pages = u64::from(die) * 100;
        match (action, die) {
            (Action::Resume, 0..8) => return Event::NotResumed("no".into()),
            (Action::Resume | Action::Retire, _) => {}
            (Action::AwaitRunning | Action::Ask, 0..50) => return Event::NeverRuns,
            (_, 0..8) => return Event::Failed(Failure::Peer("cut".into())),
            (Action::Arm { quiesced: true } | Action::Collect { quiesced: true }, 8..16) => {
                return Event::FailedQuiesced(Failure::Here("stop".into()));
            }
            (_, 8..12) if can_cancel && *action != Action::Commit => return Event::Cancelled,
            _ => {}
        }
        match action {
            Action::Greet => Event::Accepted,
            Action::Arm { .. } => Event::Armed { pages },
            Action::Collect { .. } => Event::Collected { pages },
            Action::Publish => Event::Published,
            Action::Flush => Event::Flushed { pages },
            Action::Stop => Event::Stopped,
            Action::Save => Event::Saved,
            Action::Finish => Event::Finished,
            Action::AwaitReady => Event::Ready,
            Action::Commit if die < 20 => Event::CommitUnsure("cut".into()),
            Action::Commit => Event::Committed,
            Action::AwaitRunning | Action::Ask => Event::Running,
            Action::Retire => Event::Retired,
            Action::Resume => Event::Resumed,
            Action::End(_) => unreachable!("the end is not done"),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        #[test]
        fn whatever_fails_the_owner_is_named_and_the_guest_is_resumed_just_when_it_was_stopped(
            dice in prop::collection::vec(any::<u8>(), 64..256),
            direct_io: bool,
        ) {
            let limits = Limits { direct_io, timeout: Some(Duration::from_secs(20)), ..Limits::default() };
            let (done, outcome) = play(&dice, limits);
            let at = |wanted: &Action| done.iter().position(|action| action == wanted);
            let (stopped, resumed) = (at(&Action::Stop), at(&Action::Resume));
            let quiesced = |action: &Action| matches!(action, Action::Arm { quiesced: true } | Action::Collect { quiesced: true });
            let stood_still = resumed.is_some_and(|resumed| quiesced(&done[resumed - 1]));
            let waits = |action: &Action| matches!(action, Action::AwaitRunning | Action::Ask);
            let committed = done.iter().position(waits);
            match outcome.owner {
                Owner::Target => prop_assert!(committed.is_some() && resumed.is_none()),
                Owner::InDoubt => prop_assert!(committed.is_some() && resumed.is_none()),
                Owner::Source => {
                    prop_assert_eq!(stopped.is_some() || stood_still, resumed.is_some());
                    prop_assert!(outcome.cancelled || outcome.failure.is_some(), "no reason given");
                }
                Owner::SourceStopped => prop_assert!(resumed.is_some()),
            }
            if let (Some(committed), Some(resumed)) = (committed, resumed) {
                let last = &done[resumed - 1];
                prop_assert!(committed < resumed && waits(last), "resumed without the target's word, after {last:?}");
            }
        }
    }
}
