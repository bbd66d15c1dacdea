//! How a migration is shown while it runs: two lines that are drawn again, or a line a second.

use crate::args::Progress;
use crate::report;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use migrate::Status;
use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A display that runs until it is ended.
pub struct Display {
    ended: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Display {
    /// Shows the status as it changes.
    pub fn start(how: Progress, status: &Arc<Mutex<Status>>, channels: u8) -> Self {
        let how = match how {
            Progress::Auto if std::io::stderr().is_terminal() => Progress::Bar,
            Progress::Auto => Progress::Plain,
            chosen => chosen,
        };
        if how == Progress::None {
            return Self { ended: None };
        }
        let (end, ended) = mpsc::channel();
        let status = status.clone();
        let read = move || status.lock().expect("no holder panics").clone();
        let show = move || match how {
            Progress::Bar => {
                let bar = bar();
                while ended.recv_timeout(REDRAW) == Err(RecvTimeoutError::Timeout) {
                    draw(&bar, &read(), channels);
                }
                bar.finish_and_clear();
            }
            _ => {
                while ended.recv_timeout(LINE) == Err(RecvTimeoutError::Timeout) {
                    eprintln!("{}", report::progress_line(&read(), channels));
                }
            }
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

fn bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{wide_bar} {prefix}\n{msg}").expect("a fixed template");
    bar.set_style(style.progress_chars("=> "));
    bar
}

/// The bar shows the first pass, which only grows; afterwards the words tell how far the switchover is.
fn draw(bar: &ProgressBar, status: &Status, channels: u8) {
    let ram = &status.ram;
    let done = if status.whimbrel.rounds > 0 {
        1000
    } else {
        let all = ram.total - status.whimbrel.holes_skipped * ram.page_size;
        1000 * all.saturating_sub(ram.remaining) / all.max(1)
    };
    bar.set_position(bar.position().max(done));
    bar.set_prefix(format!("first pass {:>3}%", bar.position() / 10));
    bar.set_message(report::progress_line(status, channels));
}

/// Fast enough to look alive, slow enough to cost nothing.
const REDRAW: Duration = Duration::from_millis(100);
const LINE: Duration = Duration::from_secs(1);
