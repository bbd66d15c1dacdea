//! Decides a migration: when to send another round, when to stop the guest, and at every moment who may run it.
//! Does no I/O, asks no clock (it is told the time), and knows neither QEMU nor sockets.
//!
//! Each end is a machine that is told what happened and answers with the one thing to do next:
//!
//! ```
//! use whimbrel_engine::{Action, Event, Limits, Source};
//! use std::time::Duration;
//!
//! let mut source = Source::new(Limits::default());
//! assert_eq!(source.start(), Action::Greet);
//! let next = source.on(Event::Accepted, Duration::from_millis(3));
//! assert_eq!(next, Action::Arm { quiesced: false });
//! ```

mod course;
mod forecast;
mod parameters;
mod source;
mod target;

pub use course::{Action, Event, Failure, Outcome, Owner, Phase};
pub use forecast::{Forecast, Parts};
pub use parameters::{Limits, ParameterError, TimeoutAction, ZeroPageDetection};
pub use source::Source;
pub use target::{Target, TargetAction, TargetEvent, TargetOutcome, TargetPhase};
