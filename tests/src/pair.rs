//! Two QEMUs with one guest: it runs in the first, the second waits for it. `whimbrel` moves it.

use std::time::Duration;

use crate::{
    Accel, Backend, Beat, DEADLINE, Disk, Error, Finished, Guest, Transcript, Vm, VmSpec, Whimbrel,
    wait_until,
};

/// A pair to be.
#[derive(Debug, Clone)]
pub struct PairSpec {
    source: VmSpec,
    target: VmSpec,
}

/// A guest in its source, and a target that waits.
pub struct Pair {
    /// Where the guest runs at first.
    pub source: Vm,
    /// Where it is to run.
    pub target: Vm,
}

/// A migration under way.
pub struct Migration {
    /// `whimbrel migrate`.
    pub source: Whimbrel,
    /// `whimbrel receive`.
    pub target: Whimbrel,
}

/// A migration that has ended, well or not.
#[derive(Debug)]
pub struct Moved {
    /// `whimbrel migrate`.
    pub source: Finished,
    /// `whimbrel receive`.
    pub target: Finished,
}

impl PairSpec {
    /// Who runs the guest's instructions, at both ends.
    pub fn accel(self, accel: Accel) -> Self {
        self.both(|spec| spec.accel(accel))
    }

    /// Where guest RAM lies, at both ends.
    pub fn backend(self, backend: Backend) -> Self {
        self.both(|spec| spec.backend(backend))
    }

    /// Where guest RAM lies at the target, if not as at the source.
    pub fn target_backend(mut self, backend: Backend) -> Self {
        self.target = self.target.backend(backend);
        self
    }

    /// How much guest RAM there is.
    pub fn ram_mib(self, mib: u64) -> Self {
        self.both(|spec| spec.ram_mib(mib))
    }

    /// Adds a disk on shared storage.
    pub fn disk(self, disk: Disk) -> Self {
        self.both(|spec| spec.disk(disk.clone()))
    }

    /// Adds a balloon device with free page reporting.
    pub fn balloon(self) -> Self {
        self.both(VmSpec::balloon)
    }

    /// Adds one word to both command lines.
    pub fn arg(self, word: &str) -> Self {
        self.both(|spec| spec.arg(word))
    }

    /// Adds one word to the target's command line, such as `-S`.
    pub fn target_arg(mut self, word: &str) -> Self {
        self.target = self.target.arg(word);
        self
    }

    /// Starts another target that waits.
    pub fn await_incoming(&self) -> Result<Vm, Error> {
        self.target.await_incoming()
    }

    fn both(self, change: impl Fn(VmSpec) -> VmSpec) -> Self {
        PairSpec { source: change(self.source), target: change(self.target) }
    }

    /// Starts both and waits until the guest is at work.
    #[track_caller]
    pub fn boot(&self) -> Result<Pair, Error> {
        let pair = Pair { source: self.source.boot()?, target: self.target.await_incoming()? };
        pair.source.wait_ok();
        Ok(pair)
    }
}

impl Pair {
    /// Both ends as [`VmSpec::new`] has them.
    #[expect(clippy::new_ret_no_self, reason = "reads as what it leads to")]
    pub fn new(guest: Guest) -> PairSpec {
        let spec = VmSpec::new(guest);
        PairSpec { source: spec.clone(), target: spec }
    }

    /// Moves the guest, with further arguments for `whimbrel migrate`, and waits for the end of both programs.
    #[track_caller]
    pub fn migrate(&self, arguments: &[&str]) -> Moved {
        self.start_migration(arguments).wait()
    }

    /// Starts to move the guest.
    #[track_caller]
    pub fn start_migration(&self, arguments: &[&str]) -> Migration {
        let (target, address) = self.start_receiver(&[]);
        let source = self.start_sender(&address, arguments);
        Migration { source, target }
    }

    /// Starts `whimbrel receive` on a free port; gives the address to migrate to.
    #[track_caller]
    pub fn start_receiver(&self, arguments: &[&str]) -> (Whimbrel, String) {
        let socket = self.target.qmp_socket().display().to_string();
        let mut words = vec!["receive", "tcp:127.0.0.1:0", "--qmp", &socket];
        words.extend(arguments);
        let mut receiver = Whimbrel::start(&words);
        let line = receiver.wait_line(LISTENING, DEADLINE);
        let address = line.split(LISTENING).nth(1).and_then(|rest| rest.split_whitespace().next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        (receiver, address)
    }

    /// Starts `whimbrel migrate`, with JSON as its result.
    #[track_caller]
    pub fn start_sender(&self, address: &str, arguments: &[&str]) -> Whimbrel {
        self.start_sender_without("", address, arguments)
    }

    /// As [`Pair::start_sender`], with a rule switched off.
    #[track_caller]
    pub fn start_sender_without(&self, rule: &str, address: &str, arguments: &[&str]) -> Whimbrel {
        let socket = self.source.qmp_socket().display().to_string();
        let mut words = vec!["migrate", address, "--qmp", &socket, "--json", "--progress", "none"];
        words.extend(arguments);
        Whimbrel::start_without(rule, &words)
    }

    /// What the guest has printed, here and then there.
    pub fn transcript(&self) -> Transcript {
        self.source.transcript().followed_by(&self.target.transcript())
    }

    /// Waits until the guest has checked all of its memory twice at the target, or has slept there for ten
    /// heartbeats if it only idles; and sees no harm in all that it has printed since it was booted: no lost
    /// page, no heartbeat missing or printed by both ends.
    #[track_caller]
    pub fn wait_ok_after_migration(&self) {
        for workload in self.target.guest().workloads() {
            let came = wait_until(DEADLINE, || {
                let beats = self.target.transcript().beats_by_workload();
                beats.get(&workload).is_some_and(|beats| has_checked_all(beats)).then_some(())
            });
            if came.is_none() {
                self.target.fail(&format!("workload {workload:?} does not go on at the target"));
            }
        }
        if let Some(harm) = self.transcript().harm() {
            self.target.fail(&harm);
        }
    }

    /// Asserts that the guest runs at the source only, as before, and that nothing is left of whimbrel there.
    #[track_caller]
    pub fn assert_back_at_source(&self) {
        let running = wait_until(Duration::from_secs(5), || self.source.is_running().then_some(()));
        if running.is_none() {
            self.source.fail("the source does not run");
        }
        assert!(!self.target.is_running(), "the target runs as well");
        let traces = self.source.traces();
        assert!(traces.is_empty(), "left behind in the source: {traces:?}");
        self.source.wait_ok();
    }

    /// Asserts that the guest runs at the target only.
    #[track_caller]
    pub fn assert_at_target(&self) {
        if !self.target.is_running() {
            self.target.fail("the target does not run");
        }
        assert!(!self.source.is_running(), "the source runs as well");
    }
}

/// What `whimbrel receive` prints before its address.
const LISTENING: &str = "listening on ";

fn has_checked_all(beats: &[Beat]) -> bool {
    let (Some(first), Some(last)) = (beats.first(), beats.last()) else { return false };
    let idles = last.visits == first.visits;
    // The lap under way at the first heartbeat does not count.
    if idles { beats.len() >= 10 } else { last.lap >= first.lap + 3 }
}

impl Migration {
    /// Waits for the end of both programs.
    #[track_caller]
    pub fn wait(self) -> Moved {
        let source = self.source.wait(MIGRATION_MAX);
        let target = self.target.wait(DEADLINE);
        Moved { source, target }
    }
}

/// No migration in a test takes longer than this, unless it hangs.
const MIGRATION_MAX: Duration = Duration::from_secs(180);

impl Moved {
    /// Asserts that both ends say that it is done; gives the JSON result of the source.
    #[track_caller]
    pub fn expect_done(&self) -> serde_json::Value {
        assert!(
            self.source.code == Some(0) && self.target.code == Some(0),
            "the migration failed\nsource: {:#?}\ntarget: {:#?}",
            self.source,
            self.target
        );
        self.source.json()
    }
}
