//! The guest as a whole: its memory and a thread for each vCPU, which run, stand still, or have ended for good. Knows
//! nothing of migration.

use crate::memory::Memory;
use crate::vcpu::{Tally, Vcpu};
use ram::PAGE;
use serde::Serialize;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What a guest is made of. Both ends must have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of RAM, whole pages.
    pub ram_bytes: u64,
    /// Threads that work on it.
    pub vcpus: u32,
    /// Bytes that they work on together; the rest is never touched.
    pub working_bytes: u64,
    /// Pages that each of them visits in a second, if it can; it writes every other one.
    pub visits_per_second: u32,
}

/// How a guest is: sums over its vCPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Health {
    /// Pages checked.
    pub visits: u64,
    /// Pages written.
    pub writes: u64,
    /// Pages that did not hold what was written to them.
    pub lost: u64,
    /// Times that every page was checked, by the slowest vCPU.
    pub laps: u64,
}

/// A guest. Clones are handles of the same one; its threads end with the last of them.
#[derive(Clone, Debug)]
pub struct Guest {
    pub(crate) machine: Arc<Machine>,
    _threads: Arc<Threads>,
}

/// Why a guest can't be made or used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum GuestError {
    #[error(
        "{working_bytes} of {ram_bytes} bytes for {vcpus} vCPUs: each takes at least 2 pages, and all must fit"
    )]
    Shape { ram_bytes: u64, working_bytes: u64, vcpus: u32 },
    #[error("cannot get {ram_bytes} bytes of memory")]
    Memory { ram_bytes: u64, source: io::Error },
    #[error("cannot start the thread of vCPU {vcpu}")]
    Thread { vcpu: usize, source: io::Error },
    #[error("the guest has ended and can't run again")]
    Ended,
    #[error("the saved state is not one of a guest")]
    State { source: serde_json::Error },
    #[error("the saved state is of {saved} vCPUs, and this guest has {vcpus}")]
    Vcpus { saved: usize, vcpus: usize },
    #[error("RAM holds another table of generations of vCPU {vcpu} than was saved")]
    Table { vcpu: usize },
}

impl Guest {
    /// Starts a guest.
    pub fn boot(shape: Shape) -> Result<Self, GuestError> {
        let guest = Self::await_incoming(shape)?;
        guest.machine.each_vcpu(|_, vcpu| vcpu.boot(&guest.machine.memory));
        guest.machine.run()?;
        Ok(guest)
    }

    /// A guest with untouched memory that waits to become another one.
    pub fn await_incoming(shape: Shape) -> Result<Self, GuestError> {
        let machine = Arc::new(Machine::new(shape)?);
        let threads = Arc::new(Threads::start(&machine)?);
        Ok(Self { machine, _threads: threads })
    }

    /// How it is now.
    pub fn health(&self) -> Health {
        let mut health = Health { laps: u64::MAX, ..Health::default() };
        self.machine.each_vcpu(|_, Vcpu { tally, .. }| {
            health.visits += tally.visits;
            health.writes += tally.writes;
            health.lost += tally.lost;
            health.laps = health.laps.min(tally.laps);
        });
        health
    }

    /// Whether its vCPUs run.
    pub fn is_running(&self) -> bool {
        self.machine.switch.runs()
    }

    /// Returns when no vCPU runs any more. Says whether they ran before.
    pub fn pause(&self) -> bool {
        self.machine.halt(Power::Paused)
    }

    /// Lets its vCPUs run. Fails if it has ended.
    pub fn resume(&self) -> Result<(), GuestError> {
        self.machine.run()
    }
}

impl Default for Shape {
    /// 256 MiB, a quarter of it worked on by 2 vCPUs, each as fast as checks the whole of it in a second.
    fn default() -> Self {
        Self { ram_bytes: 256 << 20, vcpus: 2, working_bytes: 64 << 20, visits_per_second: 8192 }
    }
}

impl Shape {
    fn pages_of_a_vcpu(&self) -> Result<u64, GuestError> {
        let Self { ram_bytes, vcpus, working_bytes, .. } = *self;
        let pages = (working_bytes / PAGE as u64).checked_div(vcpus.into()).unwrap_or_default();
        match pages >= 2 && working_bytes <= ram_bytes {
            true => Ok(pages),
            false => Err(GuestError::Shape { ram_bytes, working_bytes, vcpus }),
        }
    }
}

/// What the threads of a guest share.
#[derive(Debug)]
pub(crate) struct Machine {
    pub memory: Arc<Memory>,
    vcpus: Vec<Mutex<Vcpu>>,
    visits_per_tick: u32,
    switch: Switch,
}

impl Machine {
    fn new(shape: Shape) -> Result<Self, GuestError> {
        let pages = shape.pages_of_a_vcpu()?;
        let ram_bytes = shape.ram_bytes;
        let memory = Memory::new(ram_bytes).map_err(|source| GuestError::Memory { ram_bytes, source })?;
        let vcpus = (0..u64::from(shape.vcpus)).map(|at| Mutex::new(Vcpu::new(at * pages, pages))).collect();
        let visits_per_tick = shape.visits_per_second / TICKS_PER_SECOND;
        Ok(Self { memory: Arc::new(memory), vcpus, visits_per_tick, switch: Switch::default() })
    }

    pub fn vcpu_count(&self) -> u32 {
        self.vcpus.len() as u32
    }

    /// Counts of all vCPUs, which must stand still.
    pub fn save(&self) -> Vec<Tally> {
        let mut tallies = Vec::new();
        self.each_vcpu(|_, vcpu| tallies.push(vcpu.tally.clone()));
        tallies
    }

    /// Takes over the counts of another guest, whose memory is in place already.
    pub fn load(&self, tallies: Vec<Tally>) -> Result<(), GuestError> {
        let (saved, vcpus) = (tallies.len(), self.vcpus.len());
        if saved != vcpus {
            return Err(GuestError::Vcpus { saved, vcpus });
        }
        let mut wrong = None;
        let mut tallies = tallies.into_iter();
        self.each_vcpu(|at, vcpu| {
            vcpu.tally = tallies.next().expect("as many as vCPUs");
            if !vcpu.has_its_table(&self.memory) {
                wrong.get_or_insert(at);
            }
        });
        wrong.map_or(Ok(()), |vcpu| Err(GuestError::Table { vcpu }))
    }

    pub fn run(&self) -> Result<(), GuestError> {
        match self.switch.turn(Power::Running) {
            Power::Ended => Err(GuestError::Ended),
            _ => Ok(()),
        }
    }

    /// Returns when no vCPU runs any more. Says whether they ran before.
    pub fn halt(&self, power: Power) -> bool {
        let before = self.switch.turn(power);
        // Who visits pages holds its lock, and looks at the switch before each visit.
        self.each_vcpu(|_, _| {});
        before == Power::Running
    }

    fn each_vcpu(&self, mut each: impl FnMut(usize, &mut Vcpu)) {
        self.vcpus.iter().enumerate().for_each(|(at, vcpu)| each(at, &mut lock(vcpu)));
    }

    /// The thread of a vCPU.
    fn run_vcpu(&self, vcpu: &Mutex<Vcpu>) {
        while self.switch.wait_until_running() {
            let began = Instant::now();
            self.tick(&mut lock(vcpu));
            thread::sleep(TICK.saturating_sub(began.elapsed()).max(REST));
        }
    }

    fn tick(&self, vcpu: &mut Vcpu) {
        for _ in 0..self.visits_per_tick.max(1) {
            if !self.switch.runs() {
                return;
            }
            vcpu.visit(&self.memory);
        }
    }
}

/// Whether a guest runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Power {
    Running,
    #[default]
    Paused,
    /// For good.
    Ended,
}

#[derive(Debug, Default)]
struct Switch {
    power: Mutex<Power>,
    turned: Condvar,
    /// The same, for a look before every visit.
    runs: AtomicBool,
}

impl Switch {
    /// Says what it was before. From its end a guest does not come back.
    fn turn(&self, to: Power) -> Power {
        let mut power = lock(&self.power);
        let before = *power;
        if before != Power::Ended {
            *power = to;
            self.runs.store(to == Power::Running, Ordering::SeqCst);
            self.turned.notify_all();
        }
        before
    }

    fn runs(&self) -> bool {
        self.runs.load(Ordering::SeqCst)
    }

    /// False when the guest has ended.
    fn wait_until_running(&self) -> bool {
        let power = lock(&self.power);
        let waited = self.turned.wait_while(power, |power| *power == Power::Paused);
        *waited.expect("no holder panics") == Power::Running
    }
}

/// The vCPUs' threads, which end when this is dropped.
#[derive(Debug)]
struct Threads {
    machine: Arc<Machine>,
    running: Vec<JoinHandle<()>>,
}

impl Threads {
    fn start(machine: &Arc<Machine>) -> Result<Self, GuestError> {
        let mut threads = Self { machine: machine.clone(), running: Vec::new() };
        for vcpu in 0..machine.vcpus.len() {
            let machine = machine.clone();
            let run = move || machine.run_vcpu(&machine.vcpus[vcpu]);
            let thread = thread::Builder::new().name(format!("vcpu{vcpu}")).spawn(run);
            threads.running.push(thread.map_err(|source| GuestError::Thread { vcpu, source })?);
        }
        Ok(threads)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.machine.switch.turn(Power::Ended);
        for thread in self.running.drain(..) {
            thread.join().expect("a vCPU does not panic");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder panics")
}

const TICKS_PER_SECOND: u32 = 100;
const TICK: Duration = Duration::from_millis(1000 / TICKS_PER_SECOND as u64);

/// A vCPU that can't keep up still lets others have its lock.
const REST: Duration = Duration::from_micros(50);

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Shape =
        Shape { ram_bytes: 1 << 20, vcpus: 2, working_bytes: 1 << 19, visits_per_second: 10_000 };

    #[test]
    fn a_paused_guest_does_nothing_until_it_is_resumed() {
        let guest = Guest::boot(SMALL).unwrap();
        while guest.health().laps < 2 {
            thread::sleep(TICK);
        }
        assert!(guest.pause() && !guest.pause());
        let paused = guest.health();
        thread::sleep(5 * TICK);
        assert_eq!(guest.health(), paused);
        guest.resume().unwrap();
        while guest.health().laps < paused.laps + 2 {
            thread::sleep(TICK);
        }
        assert_eq!(guest.health().lost, 0);
    }

    #[test]
    fn a_guest_that_ended_does_not_come_back() {
        let guest = Guest::boot(SMALL).unwrap();
        guest.machine.halt(Power::Ended);
        assert!(matches!(guest.resume(), Err(GuestError::Ended)));
        assert!(!guest.is_running());
    }

    #[test]
    fn a_shape_that_does_not_fit_is_refused() {
        for shape in [
            Shape { working_bytes: 2 << 20, ..SMALL },
            Shape { working_bytes: 4096, ..SMALL },
            Shape { vcpus: 0, ..SMALL },
        ] {
            assert!(matches!(Guest::boot(shape), Err(GuestError::Shape { .. })), "{shape:?}");
        }
        let odd = Shape { ram_bytes: (1 << 20) + 1, ..SMALL };
        assert!(matches!(Guest::boot(odd), Err(GuestError::Memory { .. })));
    }
}
