//! Registers of an arm64 thread that is stopped in a system call.

#![expect(unsafe_code, reason = "a register file of zeros to be read into")]

use super::tracee::Tracee;
use std::io;

/// The registers, and how to enter another call with them. While a thread is stopped in a call, x7 reads as the
/// direction of the stop and writes to it are dropped: the kernel keeps the real one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registers {
    general: libc::user_regs_struct,
    /// The call the kernel is to run or ran; -1 for none.
    call: i32,
}

impl Registers {
    /// Reads them from a stopped thread.
    pub fn read(tracee: &Tracee) -> io::Result<Self> {
        // SAFETY: registers are plain numbers.
        let zeros: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        let general = tracee.register_set(libc::NT_PRSTATUS, zeros)?;
        Ok(Self { general, call: tracee.register_set(NT_ARM_SYSTEM_CALL, 0i32)? })
    }

    /// Writes them to a stopped thread.
    pub fn write(&self, tracee: &Tracee) -> io::Result<()> {
        tracee.set_register_set(libc::NT_PRSTATUS, &self.general)?;
        tracee.set_register_set(NT_ARM_SYSTEM_CALL, &self.call)
    }

    /// Where the instruction is that entered the call.
    pub fn instruction(&self) -> u64 {
        self.general.pc.wrapping_sub(CALL_INSTRUCTION.len() as u64)
    }

    /// At the entry of a call: enters this one instead.
    pub fn entering(&self, number: libc::c_long, argument: u64) -> Self {
        let mut general = self.general;
        general.regs[0] = argument;
        Self { general, call: number as i32 }
    }

    /// Back before the instruction, to make this call.
    pub fn back_to(&self, number: libc::c_long, argument: u64) -> Self {
        let mut general = self.general;
        general.pc = self.instruction();
        general.regs[0] = argument;
        general.regs[8] = number as u64;
        // Not in a call: the kernel must not take x0 for a result that asks for a restart.
        Self { general, call: -1 }
    }

    /// Back before the instruction, to make the call that these registers were read at the entry of.
    pub fn back_to_repeat(&self) -> Self {
        self.back_to(libc::c_long::from(self.call), self.general.regs[0])
    }
}

/// `svc #0`.
pub(super) const CALL_INSTRUCTION: &[u8] = &[0x01, 0x00, 0x00, 0xd4];

/// A 64-bit little-endian Arm (linux/audit.h).
pub(super) const AUDIT_ARCH: u32 = 0xc000_00b7;

/// The register set that holds the number of the call (linux/elf.h).
const NT_ARM_SYSTEM_CALL: i32 = 0x404;
