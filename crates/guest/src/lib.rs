//! A small virtual machine of our own: memory, "vCPUs" that are plain threads, and a log of the pages they write.
//! They check every page at every visit, so a page that a migration loses or tears is seen and counted.
//!
//! It needs neither QEMU nor KVM nor any right, and shows how another VMM embeds the library: implement
//! [`migrate::SourceVm`] and [`migrate::TargetVm`], reach memory by [`ram::Reach`] and [`ram::Land`], report writes
//! by [`dirty::Tracker`], then run [`migrate::source::run`] at one end and [`migrate::target::run`] at the other:
//!
//! ```
//! use channel::{Address, Listener};
//! use engine::Owner;
//! use guest::{Guest, Shape};
//! use migrate::{source, target};
//! # use whimbrel_guest as guest;
//!
//! let shape = Shape { ram_bytes: 64 << 20, ..Shape::default() };
//! let here = Guest::boot(shape)?;
//! let there = Guest::await_incoming(shape)?;
//!
//! let listener = Listener::bind(&"tcp:127.0.0.1:0".parse()?)?;
//! let address: Address = listener.address().clone();
//! let receiving = there.target_setup();
//! let target = std::thread::spawn(move || target::run(&listener, receiving));
//!
//! let session = wire::Session(*b"drawn at random!");
//! let (outcome, _) = source::run(source::Setup { channels: 4, ..here.source_setup(address, session) });
//! target.join().expect("a target does not panic");
//!
//! assert_eq!(outcome.owner, Owner::Target);
//! assert!(there.is_running() && !here.is_running());
//! assert_eq!(there.health().lost, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod machine;
mod marks;
mod memory;
mod stamp;
mod vcpu;
mod vm;

pub use machine::{Guest, GuestError, Health, Shape};
