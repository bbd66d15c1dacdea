//! Reaching the RAM of another process, at both ends, on memory of every kind. The other process is a child of ours.

#![allow(unsafe_code, reason = "system calls that take rights away from a thread")]

extern crate whimbrel_ram as ram;

#[path = "../victim/mod.rs"]
mod victim;

mod bed;
mod refusals;
mod source;
mod target;
