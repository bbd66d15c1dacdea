//! Numbered points at which a test kills the process that started us. Not compiled into anything else.

/// Kills our parent here, and waits until it is gone, if `WHIMBREL_FAULT` is this number.
#[cfg(feature = "faults")]
pub(crate) fn point(number: u32) {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::getppid;
    if std::env::var("WHIMBREL_FAULT").ok().and_then(|text| text.parse().ok()) != Some(number) {
        return;
    }
    let parent = getppid();
    kill(parent, Signal::SIGKILL).expect("the parent can be killed");
    while getppid() == parent {
        std::thread::yield_now();
    }
}

#[cfg(not(feature = "faults"))]
pub(crate) fn point(_number: u32) {}
