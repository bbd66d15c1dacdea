//! What the bare-metal guest says on its serial port: one `ready` line, then heartbeats.

use std::path::Path;

/// All that a guest has said so far.
pub struct Serial(String);

/// One heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Counts up by one from 0; ten come in a second.
    pub number: u64,
    /// Pages checked.
    pub visits: u64,
    /// Times that every page was checked.
    pub lap: u64,
    /// Pages written.
    pub writes: u64,
    /// Pages that were not as the guest left them.
    pub lost: u64,
}

impl Serial {
    /// What is in the file that QEMU writes; nothing as long as there is none.
    pub fn read(path: &Path) -> Self {
        Self(String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned())
    }

    /// Pages that the guest works on, said once when it has booted.
    pub fn pages(&self) -> Option<u64> {
        let line = self.lines().find(|line| line.starts_with("ready "))?;
        field(line, "pages")
    }

    /// All heartbeats. One that was cut in two by the move is left out.
    pub fn beats(&self) -> impl Iterator<Item = Beat> {
        self.lines().filter_map(Beat::parse)
    }

    /// The newest heartbeat.
    pub fn last(&self) -> Option<Beat> {
        self.beats().last()
    }

    fn lines(&self) -> impl Iterator<Item = &str> {
        self.0.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(str::trim_end)
    }
}

impl Beat {
    fn parse(line: &str) -> Option<Self> {
        let line = line.strip_prefix("ok ")?;
        Some(Self {
            number: field(line, "beat")?,
            visits: field(line, "visits")?,
            lap: field(line, "lap")?,
            writes: field(line, "gen")?,
            lost: field(line, "lost")?,
        })
    }
}

fn field(line: &str, name: &str) -> Option<u64> {
    let mut fields = line.split(' ').filter_map(|field| field.split_once('='));
    fields.find(|(found, _)| *found == name)?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_heartbeats_are_read_and_halves_are_not() {
        let text =
            "ready pages=8 base=15d000\r\nok beat=0 visits=1 lap=0 gen=9 lost=0\r\nok beat=1 visits=9 la";
        let serial = Serial(text.into());
        assert_eq!(serial.pages(), Some(8));
        assert_eq!(serial.beats().count(), 1);
        assert_eq!(serial.last(), Some(Beat { number: 0, visits: 1, lap: 0, writes: 9, lost: 0 }));
        assert_eq!(Serial("p=1 gen=9 lost=0\n".into()).last(), None);
    }
}
