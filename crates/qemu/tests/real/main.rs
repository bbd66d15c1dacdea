//! Tests with a real QEMU: the one of `WHIMBREL_QEMU`, or `qemu-system-x86_64`. Without one they say so and pass.

mod bed;
mod blocks;
mod check;
mod device;
mod guard;
mod qmp;
mod vm;
