//! How a migration is shown while it runs: two lines that are drawn again, or a line a second.

use crate::args::Progress;
use crate::report;
use migrate::Status;
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A display that runs until it is ended.
pub struct Display {
    ended: Option<(Sender<()>, JoinHandle<()>)>,
}

type Shared = Arc<Mutex<Status>>;

impl Display {
    /// Shows the status as it changes.
    pub fn start(how: Progress, status: &Shared) -> Self {
        let how = match how {
            Progress::Auto if is_terminal() => Progress::Bar,
            Progress::Auto => Progress::Plain,
            chosen => chosen,
        };
        if how == Progress::None {
            return Self { ended: None };
        }
        let (end, ended) = mpsc::channel();
        let status = status.clone();
        let show = move || match how {
            Progress::Bar => draw(&status, &ended),
            _ => print(&status, &ended),
        };
        let thread = std::thread::Builder::new().name("progress".into()).spawn(show);
        Self { ended: thread.ok().map(|thread| (end, thread)) }
    }

    /// Takes the display away.
    pub fn end(self) {
        if let Some((end, thread)) = self.ended {
            drop(end);
            thread.join().expect("a display does not panic");
        }
    }
}

fn is_terminal() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("TERM").is_some_and(|kind| kind != "dumb")
}

fn draw(status: &Shared, ended: &Receiver<()>) {
    let mut drawn = false;
    while ended.recv_timeout(REDRAW) == Err(RecvTimeoutError::Timeout) {
        let status = read(status);
        write(&format!(
            "{}{}{END}\n{}{END}\r",
            if drawn { UP } else { "" },
            cut(bar(&status)),
            cut(report::numbers(&status))
        ));
        drawn = true;
    }
    if drawn {
        write(&format!("{UP}{CLEAR}"));
    }
}

/// At once, so that nobody sees half of it.
fn write(text: &str) {
    // A terminal that is gone needs no progress.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// The first pass, which only grows; how far the switchover is, the numbers tell.
fn bar(status: &Status) -> String {
    let done = done(status);
    let filled = "=".repeat((done * BAR_COLUMNS as f64) as usize);
    format!("{:<10} [{filled:<BAR_COLUMNS$}] {:>3.0}%", report::pass(status), 100.0 * done)
}

/// How much of the first pass is done.
fn done(status: &Status) -> f64 {
    let ram = &status.ram;
    match (status.status.as_str(), status.whimbrel.rounds) {
        ("active", 0) => {
            let all = ram.total - status.whimbrel.holes_skipped * ram.page_size;
            all.saturating_sub(ram.remaining) as f64 / all.max(1) as f64
        }
        ("active" | "device" | "completed", _) => 1.0,
        _ => 0.0,
    }
}

/// A line that wrapped would not be drawn over.
fn cut(mut line: String) -> String {
    let columns =
        terminal_size::terminal_size_of(std::io::stderr()).map_or(80, |(width, _)| usize::from(width.0));
    line.truncate(columns.saturating_sub(1));
    line
}

fn print(status: &Shared, ended: &Receiver<()>) {
    while ended.recv_timeout(LINE) == Err(RecvTimeoutError::Timeout) {
        let status = read(status);
        eprintln!("{:<10}  {}", report::pass(&status), report::numbers(&status));
    }
}

fn read(status: &Shared) -> Status {
    status.lock().expect("no holder panics").clone()
}

/// As wide as the numbers below it.
const BAR_COLUMNS: usize = 51;

/// ECMA-48: to the start of the line above; erase to the end of the line; erase to the end of the screen. The cursor
/// rests at the start of the second line, so that an echoed `^C` doesn't make a third.
const UP: &str = "\r\x1b[A";
const END: &str = "\x1b[K";
const CLEAR: &str = "\x1b[J";

/// Fast enough to look alive, slow enough to cost nothing.
const REDRAW: Duration = Duration::from_millis(100);
const LINE: Duration = Duration::from_secs(1);
