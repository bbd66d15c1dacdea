//! A QMP connection that stays open and waits for events. Knows the protocol, not what anything means.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A connection to a QEMU. What goes wrong with it ends the bench: there is nothing to measure then.
pub struct Monitor {
    stream: BufReader<UnixStream>,
    events: Vec<Event>,
}

/// Something QEMU said unasked.
#[derive(Clone, Debug)]
pub struct Event {
    /// Its name in capitals.
    pub name: String,
    /// What came with it.
    pub data: Value,
    /// When it happened, by QEMU's clock, which is this host's.
    pub at: Duration,
}

impl Monitor {
    /// Connects to a QEMU that answers.
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket)
            .unwrap_or_else(|error| panic!("no monitor at {}: {error}", socket.display()));
        stream.set_read_timeout(Some(ANSWER_MAX)).expect("a timeout above zero");
        let mut monitor = Self { stream: BufReader::new(stream), events: Vec::new() };
        monitor.read();
        monitor.execute("qmp_capabilities", json!({}));
        monitor
    }

    /// Runs a command that must succeed.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Value {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.stream.get_mut().write_all(line.as_bytes()).expect("QEMU reads its monitor");
        loop {
            let mut answer = self.read();
            if let Some(value) = answer.get_mut("return") {
                return value.take();
            }
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            self.keep(answer);
        }
    }

    /// Forgets the events so far.
    pub fn forget_events(&mut self) {
        self.execute("query-name", json!({}));
        self.events.clear();
    }

    /// Waits for an event since the last [`Monitor::forget_events`].
    pub fn wait(&mut self, name: &str, wanted: impl Fn(&Value) -> bool) -> Event {
        let mut seen = 0;
        loop {
            if let Some(event) =
                self.events[seen..].iter().find(|event| event.name == name && wanted(&event.data))
            {
                return event.clone();
            }
            seen = self.events.len();
            let message = self.read();
            self.keep(message);
        }
    }

    /// Waits until a migration has reached this status. Panics if it fails.
    pub fn wait_migration(&mut self, status: &str) -> Event {
        let event = self.wait("MIGRATION", |data| data["status"] == status || data["status"] == "failed");
        assert!(event.data["status"] == status, "QEMU's own migration failed");
        event
    }

    fn keep(&mut self, message: Value) {
        let Some(name) = message["event"].as_str() else { return };
        let part = |name: &str| message["timestamp"][name].as_u64().unwrap_or_default();
        let at = Duration::from_secs(part("seconds")) + Duration::from_micros(part("microseconds"));
        self.events.push(Event { name: name.into(), data: message["data"].clone(), at });
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("QEMU answers its monitor in time");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("QEMU said {line:?}: {error}"))
    }
}

/// Also the longest that a migration may take here.
const ANSWER_MAX: Duration = Duration::from_secs(120);
