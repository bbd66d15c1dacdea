//! What happened so far, for people who replay a seed, for faults that wait for a moment, and for the oracle.

use std::time::Duration;

/// Something that happens once, or the n-th time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The target agreed.
    Agreed,
    /// Writes are watched.
    Armed,
    /// The n-th round, counted from 1, is given to the channels. The last ones are sent behind the stop.
    Round(u64),
    /// The guest is stopped to be moved.
    Stopped,
    /// Its device state is saved.
    Saved,
    /// The target was told that RAM is complete, and sent the device state.
    Finished,
    /// The target has loaded it.
    Loaded,
    /// The target says that it is ready.
    Ready,
    /// *Commit* is written.
    Committed,
    /// *Commit* is on the target's disk.
    Recorded,
    /// The guest was started at the target.
    Started,
    /// The target says that it runs.
    Told,
    /// The source says that it has heard so.
    Confirmed,
    /// The source asks what became of its commit.
    Asks,
    /// The source knows how it ended, or was killed.
    SourceOver,
    /// The target knows how it ended, or was killed.
    TargetOver,
}

/// The log of a run.
#[derive(Debug, Default)]
pub struct Log {
    /// The time of the run.
    pub now: Duration,
    /// Steps done.
    pub steps: u64,
    moments: Vec<(Moment, u64, Duration)>,
    lines: Vec<String>,
}

impl Log {
    /// Notes a moment, the first time it comes.
    pub fn note(&mut self, moment: Moment) {
        if self.step_of(moment).is_none() {
            self.moments.push((moment, self.steps, self.now));
            self.line(format!("-- {moment:?}"));
        }
    }

    /// Notes something for people.
    pub fn line(&mut self, text: String) {
        let line = format!("{:>6} {:>12.6} s  {text}", self.steps, self.now.as_secs_f64());
        self.lines.push(line);
    }

    /// Whether the moment has come.
    pub fn has(&self, moment: Moment) -> bool {
        self.step_of(moment).is_some()
    }

    /// The step at which the moment came.
    pub fn step_of(&self, moment: Moment) -> Option<u64> {
        self.find(moment).map(|(_, step, _)| *step)
    }

    /// The time at which the moment came.
    pub fn time_of(&self, moment: Moment) -> Option<Duration> {
        self.find(moment).map(|(.., time)| *time)
    }

    fn find(&self, moment: Moment) -> Option<&(Moment, u64, Duration)> {
        self.moments.iter().find(|(noted, ..)| *noted == moment)
    }

    /// The log as text.
    pub fn text(&self) -> String {
        self.lines.join("\n")
    }
}
