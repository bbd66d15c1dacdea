//! Decides a migration: rounds, convergence, switchover, who owns the VM. No I/O, no clock.
