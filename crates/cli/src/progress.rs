//! How a migration is shown while it runs: two lines that are drawn again, or a line a second.

use crate::args::Progress;
use crate::report;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use migrate::Status;
use std::io::IsTerminal;
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

/// The bar is the first pass, which only grows; how far the switchover is, the numbers tell.
fn draw(status: &Shared, ended: &Receiver<()>) {
    let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{prefix:<10} [{bar:51}] {percent:>3}%\n{wide_msg}");
    bar.set_style(style.expect("a fixed template").progress_chars("=> "));
    while ended.recv_timeout(REDRAW) == Err(RecvTimeoutError::Timeout) {
        let status = read(status);
        bar.set_prefix(report::pass(&status));
        bar.set_position((1000.0 * done(&status)) as u64);
        bar.set_message(report::numbers(&status));
        bar.tick();
    }
    bar.finish_and_clear();
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

fn print(status: &Shared, ended: &Receiver<()>) {
    while ended.recv_timeout(LINE) == Err(RecvTimeoutError::Timeout) {
        let status = read(status);
        eprintln!("{:<10}  {}", report::pass(&status), report::numbers(&status));
    }
}

fn read(status: &Shared) -> Status {
    status.lock().expect("no holder panics").clone()
}

/// Fast enough to look alive, slow enough to cost nothing.
const REDRAW: Duration = Duration::from_millis(100);
const LINE: Duration = Duration::from_secs(1);
