//! Registers of an x86-64 thread that is stopped in a system call.

#![expect(unsafe_code, reason = "a register file of zeros to be read into")]

use super::tracee::Tracee;
use std::io;

/// The registers, and how to enter another call with them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registers {
    general: libc::user_regs_struct,
}

impl Registers {
    /// Reads them from a stopped thread.
    pub fn read(tracee: &Tracee) -> io::Result<Self> {
        // SAFETY: registers are plain numbers.
        let zeros: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        Ok(Self { general: tracee.register_set(libc::NT_PRSTATUS, zeros)? })
    }

    /// Writes them to a stopped thread.
    pub fn write(&self, tracee: &Tracee) -> io::Result<()> {
        tracee.set_register_set(libc::NT_PRSTATUS, &self.general)
    }

    /// Where the instruction is that entered the call.
    pub fn instruction(&self) -> u64 {
        self.general.rip.wrapping_sub(CALL_INSTRUCTION.len() as u64)
    }

    /// At the entry of a call: enters this one instead.
    pub fn entering(&self, number: libc::c_long, argument: u64) -> Self {
        let mut general = self.general;
        general.orig_rax = number as u64;
        general.rdi = argument;
        Self { general }
    }

    /// Back before the instruction, to make this call.
    pub fn back_to(&self, number: libc::c_long, argument: u64) -> Self {
        let mut general = self.general;
        general.rip = self.instruction();
        general.rax = number as u64;
        // Not in a call: the kernel must not take the number in rax for a result that asks for a restart.
        general.orig_rax = u64::MAX;
        general.rdi = argument;
        Self { general }
    }

    /// Back before the instruction, to make the call that these registers were read at the entry of.
    pub fn back_to_repeat(&self) -> Self {
        self.back_to(self.general.orig_rax as libc::c_long, self.general.rdi)
    }
}

/// `syscall`.
pub(super) const CALL_INSTRUCTION: &[u8] = &[0x0f, 0x05];

/// A 64-bit little-endian x86 (linux/audit.h).
pub(super) const AUDIT_ARCH: u32 = 0xc000_003e;
