//! Ctrl-C and a polite kill end a migration cleanly.

use migrate::{Inbox, Note};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::Arc;

/// From now on SIGINT, SIGTERM and SIGHUP cancel the migration behind `inbox`. Its last words say so: a line at once
/// would tear the display.
pub fn cancel_on_signals(inbox: &Arc<Inbox<Note>>) -> std::io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let inbox = inbox.clone();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for _ in signals.forever() {
            inbox.put(Note::Cancel);
        }
    })?;
    Ok(())
}
