//! What guests print on the serial port, and what it means. Knows the lines of every guest of ours:
//! `ok [who=NAME] beat=N … lost=N` as a heartbeat, `LOST …` for memory that is not what the guest wrote.

use std::collections::BTreeMap;
use std::path::Path;

/// All that a guest has printed so far, or that the same guest has printed on two hosts.
#[derive(Debug, Clone, Default)]
pub struct Transcript(String);

/// One heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beat {
    /// The workload that prints it; empty for a guest with only one.
    pub who: String,
    /// Counts up by one from 0.
    pub number: u64,
    /// Pages verified.
    pub visits: u64,
    /// Times that every page of the working set was verified.
    pub lap: u64,
    /// Pages written: each is a new generation.
    pub writes: u64,
    /// Pages that were not what the guest wrote.
    pub lost: u64,
}

impl Transcript {
    /// The file that QEMU writes; empty as long as there is none.
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_default();
        Transcript(String::from_utf8_lossy(&bytes).replace('\r', ""))
    }

    /// This transcript, continued on another host: a line may begin here and end there.
    pub(crate) fn followed_by(mut self, next: &Transcript) -> Self {
        self.0.push_str(&next.0);
        self
    }

    /// The lines that are complete.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.0.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(str::trim_end)
    }

    /// All heartbeats, in order. A line that was cut in two is none.
    pub fn beats(&self) -> Vec<Beat> {
        self.lines().filter_map(Beat::parse).collect()
    }

    /// The heartbeats of each workload.
    pub fn beats_by_workload(&self) -> BTreeMap<String, Vec<Beat>> {
        let mut by_workload = BTreeMap::<String, Vec<Beat>>::new();
        for beat in self.beats() {
            by_workload.entry(beat.who.clone()).or_default().push(beat);
        }
        by_workload
    }

    /// What shows that the guest did not live on unharmed: a lost page, a heartbeat that was skipped or came
    /// twice, a second boot, a panic. `None` if all is well.
    pub fn harm(&self) -> Option<String> {
        let sick =
            |line: &&str| line.starts_with("LOST") || line.contains("Kernel panic") || line.contains("BUG:");
        if let Some(line) = self.lines().find(sick) {
            return Some(line.to_owned());
        }
        if self.lines().filter(|line| line.starts_with("ready")).count() > 1 {
            return Some("the guest has booted twice".to_owned());
        }
        self.beats_by_workload().values().find_map(|beats| {
            let gap = beats.windows(2).find(|pair| pair[1].number != pair[0].number + 1);
            let lost = beats.iter().find(|beat| beat.lost > 0);
            gap.map(|pair| format!("heartbeat {} follows heartbeat {}", pair[1].number, pair[0].number))
                .or_else(|| lost.map(|beat| format!("{} pages lost", beat.lost)))
        })
    }

    /// The last lines, for a message about what went wrong.
    pub fn tail(&self) -> String {
        const LINES: usize = 12;
        let lines: Vec<&str> = self.0.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

impl Beat {
    fn parse(line: &str) -> Option<Self> {
        let fields: BTreeMap<&str, &str> =
            line.strip_prefix("ok ")?.split(' ').filter_map(|field| field.split_once('=')).collect();
        let number = |name: &str| fields.get(name)?.parse().ok();
        Some(Beat {
            who: fields.get("who").copied().unwrap_or_default().to_owned(),
            number: number("beat")?,
            visits: number("visits")?,
            lap: number("lap")?,
            writes: number("gen")?,
            lost: number("lost")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        "ready pages=8\nok beat=0 visits=1 lap=0 gen=9 lost=0\nok beat=1 visits=9 lap=1 gen=17 lost=0\n";

    #[test]
    fn a_heartbeat_is_read_with_all_its_counts() {
        let beats = Transcript(GOOD.into()).beats();
        assert_eq!(beats[1], Beat { who: String::new(), number: 1, visits: 9, lap: 1, writes: 17, lost: 0 });
        assert_eq!(Transcript(GOOD.into()).harm(), None);
    }

    #[test]
    fn a_line_cut_by_the_handover_is_whole_in_the_joined_transcript() {
        let (here, there) = GOOD.split_at(70);
        let joined = Transcript(here.into()).followed_by(&Transcript(there.into()));
        assert_eq!(joined.beats().len(), 2);
        assert_eq!(Transcript(here.into()).beats().len(), 1);
    }

    #[test]
    fn a_lost_page_a_skipped_beat_and_a_second_boot_are_harm() {
        let harm = |more: &str| Transcript(format!("{GOOD}{more}")).harm();
        assert!(harm("LOST page=3 want=2 got=1 kind=stale\n").is_some());
        assert!(harm("ok beat=3 visits=30 lap=3 gen=40 lost=0\n").is_some());
        assert!(harm("ok beat=1 visits=9 lap=1 gen=17 lost=0\n").is_some());
        assert!(harm("ready pages=8\n").is_some());
        assert!(harm("ok beat=2 visits=17 lap=2 gen=25 lost=1\n").is_some());
        assert_eq!(harm("ok beat=2 visits=17 lap=2 gen=25 lost=0\n"), None);
    }
}
