//! Threads with the names that QEMU's have, and what each has cost.

use crate::ThreadCpu;
use nix::time::ClockId;
use std::io;
use std::sync::Mutex;
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::Duration;

/// CPU time of the threads that have ended.
#[derive(Debug, Default)]
pub(crate) struct Costs(Mutex<Vec<ThreadCpu>>);

impl Costs {
    /// Starts a named thread whose CPU time is kept when it ends.
    pub fn spawn<'scope, T: Send + 'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        name: String,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> io::Result<ScopedJoinHandle<'scope, T>> {
        Builder::new().name(name.clone()).spawn_scoped(scope, move || {
            let result = work();
            self.note(name);
            result
        })
    }

    /// The costs so far, in the order of the names.
    pub fn listed(self) -> Vec<ThreadCpu> {
        let mut threads = self.0.into_inner().expect("no holder panics");
        threads.sort_by(|one, other| one.name.cmp(&other.name));
        threads
    }

    fn note(&self, name: String) {
        // A kernel without a clock for threads would not have started one.
        let time = ClockId::CLOCK_THREAD_CPUTIME_ID.now().map(Duration::from).unwrap_or_default();
        let cpu_ms = time.as_millis() as u64;
        self.0.lock().expect("no holder panics").push(ThreadCpu { name, cpu_ms });
    }
}
