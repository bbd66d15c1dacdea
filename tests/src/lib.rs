//! The harness of the end-to-end tests: starts real QEMUs with guests that check themselves, runs the
//! `whimbrel` program between them, and reads what the guests say. Knows nothing of how a migration works.
//!
//! What a machine may lack (QEMU, KVM, huge pages, a package mirror) comes back as [`Error::Missing`], which
//! [`or_skip!`] turns into a loud skip. Everything else that goes wrong is the test's failure and panics, with
//! what the guest said last.
//!
//! ```no_run
//! use harness::{Accel, Backend, Guest, Pair, or_skip};
//!
//! let pair = or_skip!(Pair::new(Guest::multiboot("pages=4096 rate=20000")).backend(Backend::Memfd).accel(Accel::Kvm).boot());
//! pair.migrate(&["--channels", "4"]).expect_done();
//! pair.wait_ok_after_migration();
//! ```

mod backend;
mod cgroup;
mod disk;
mod error;
mod guest;
mod hugepages;
mod memory;
mod pair;
mod qemu;
mod qmp;
mod serial;
mod vm;
mod wait;
mod whimbrel;

pub use backend::Backend;
pub use disk::{Aio, Cache, Disk};
pub use error::{Error, Missing, skip};
pub use guest::Guest;
pub use pair::{Migration, Moved, Pair, PairSpec};
pub use qemu::{Accel, Version, version};
pub use qmp::{Qmp, QmpError};
pub use serial::{Beat, Transcript};
pub use vm::{Vm, VmSpec};
pub use wait::{DEADLINE, wait_until};
pub use whimbrel::{Finished, Whimbrel};
