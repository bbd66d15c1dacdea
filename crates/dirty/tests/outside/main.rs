//! Tracking the writes of another process, on memory of every kind. The other process is a child of ours.

#![allow(unsafe_code, reason = "system calls that change what is tracked")]

extern crate whimbrel_dirty as dirty;

#[path = "../../../ram/tests/victim/mod.rs"]
mod victim;

mod discards;
mod ends;
mod mappings;
mod oracle;
mod states;
mod storm;
mod watch;
mod writers;
