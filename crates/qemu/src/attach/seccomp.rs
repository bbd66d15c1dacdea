//! What a thread's seccomp filters would do with a call of ours. Asked before the call, since the answer may be to
//! kill the process. Runs the filters' programs by itself; knows nothing of who wrote them.

use super::tracee::Tracee;
use std::io;

/// What becomes of a call that filters look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is run.
    Allowed,
    /// It is not run, and fails with an error number.
    Failed,
    /// Worse: the process is killed or sent a signal, or somebody else is asked.
    Deadly,
}

/// One instruction of a classic BPF program (linux/filter.h).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Instruction {
    pub code: u16,
    pub jump_true: u8,
    pub jump_false: u8,
    pub k: u32,
}

/// A call as filters see it (linux/seccomp.h), with one argument and the others 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub number: i32,
    pub arch: u32,
    pub instruction: u64,
    pub argument: u64,
}

/// The verdict of all filters of a stopped thread. Fails with `EACCES` if we may not read them.
pub(super) fn verdict(tracee: &Tracee, call: &Call) -> io::Result<Verdict> {
    let mut strictest = ALLOW;
    for index in 0.. {
        let Some(program) = tracee.filter(index)? else { break };
        // The kernel takes the smallest answer as a signed number.
        strictest = strictest.min(run(&program, call) as i32 & ACTION);
    }
    Ok(match strictest {
        ALLOW | LOG => Verdict::Allowed,
        ERRNO => Verdict::Failed,
        _ => Verdict::Deadly,
    })
}

/// Runs a program to its answer; one that goes astray, which the kernel does not accept, kills.
fn run(program: &[Instruction], call: &Call) -> u32 {
    let (mut a, mut x, mut memory) = (0u32, 0u32, [0u32; MEMORY_WORDS]);
    let mut at = 0;
    while let Some(&Instruction { code, jump_true, jump_false, k }) = program.get(at) {
        at += 1;
        let operand = if code & X != 0 { x } else { k };
        let cell = k as usize % MEMORY_WORDS;
        match code & CLASS {
            LD => match code & MODE {
                ABS => a = call.word(k),
                LEN => a = CALL_BYTES,
                IMM => a = k,
                MEM => a = memory[cell],
                _ => return KILL,
            },
            LDX => match code & MODE {
                LEN => x = CALL_BYTES,
                IMM => x = k,
                MEM => x = memory[cell],
                _ => return KILL,
            },
            ST => memory[cell] = a,
            STX => memory[cell] = x,
            ALU => match calculate(code, a, operand) {
                Some(result) => a = result,
                // The kernel lets a division by zero end the program with 0.
                None => return KILL,
            },
            JMP => {
                let taken = match code & OPERATION {
                    JA => {
                        at += k as usize;
                        continue;
                    }
                    JEQ => a == operand,
                    JGT => a > operand,
                    JGE => a >= operand,
                    JSET => a & operand != 0,
                    _ => return KILL,
                };
                at += usize::from(if taken { jump_true } else { jump_false });
            }
            RET => return if code & RET_A != 0 { a } else { k },
            _ if code & TXA != 0 => a = x,
            _ => x = a,
        }
    }
    KILL
}

fn calculate(code: u16, a: u32, operand: u32) -> Option<u32> {
    Some(match code & OPERATION {
        0x00 => a.wrapping_add(operand),
        0x10 => a.wrapping_sub(operand),
        0x20 => a.wrapping_mul(operand),
        0x30 => a.checked_div(operand)?,
        0x40 => a | operand,
        0x50 => a & operand,
        0x60 => a.wrapping_shl(operand),
        0x70 => a.wrapping_shr(operand),
        0x80 => a.wrapping_neg(),
        0x90 => a.checked_rem(operand)?,
        0xa0 => a ^ operand,
        _ => return None,
    })
}

impl Call {
    /// The 32-bit word at this offset.
    fn word(&self, offset: u32) -> u32 {
        let half = |value: u64| (value >> (offset % 8 * 8)) as u32;
        match offset {
            0 => self.number as u32,
            4 => self.arch,
            8 | 12 => half(self.instruction),
            16 | 20 => half(self.argument),
            _ => 0,
        }
    }
}

const CLASS: u16 = 0x07;
const LD: u16 = 0x00;
const LDX: u16 = 0x01;
const ST: u16 = 0x02;
const STX: u16 = 0x03;
const ALU: u16 = 0x04;
const JMP: u16 = 0x05;
const RET: u16 = 0x06;
const MODE: u16 = 0xe0;
const IMM: u16 = 0x00;
const ABS: u16 = 0x20;
const MEM: u16 = 0x60;
const LEN: u16 = 0x80;
const OPERATION: u16 = 0xf0;
const JA: u16 = 0x00;
const JEQ: u16 = 0x10;
const JGT: u16 = 0x20;
const JGE: u16 = 0x30;
const JSET: u16 = 0x40;
const X: u16 = 0x08;
const RET_A: u16 = 0x10;
const TXA: u16 = 0x80;
const MEMORY_WORDS: usize = 16;
/// `struct seccomp_data`.
const CALL_BYTES: u32 = 64;

/// The part of an answer that says what to do; the rest is its data.
const ACTION: i32 = 0xffff_0000_u32 as i32;
const KILL: u32 = 0;
const ERRNO: i32 = 0x0005_0000;
const LOG: i32 = 0x7ffc_0000;
const ALLOW: i32 = 0x7fff_0000;

#[cfg(test)]
mod tests {
    use super::*;

    fn i(code: u16, jump_true: u8, jump_false: u8, k: u32) -> Instruction {
        Instruction { code, jump_true, jump_false, k }
    }

    const CALL: Call =
        Call { number: 323, arch: 0xc000_003e, instruction: 0x7fff_0000_1234, argument: 0x8_0801 };

    #[test]
    fn a_filter_sees_the_call_word_by_word() {
        let word = |offset| run(&[i(LD | ABS, 0, 0, offset), i(RET | RET_A, 0, 0, 0)], &CALL);
        assert_eq!([word(0), word(4), word(8), word(12)], [323, 0xc000_003e, 0x1234, 0x7fff]);
        assert_eq!([word(16), word(20), word(24), word(60)], [0x8_0801, 0, 0, 0]);
    }

    #[test]
    fn a_list_of_denied_numbers_denies_these_and_no_others() {
        let allow = ALLOW as u32;
        let program = |number| {
            [i(LD | ABS, 0, 0, 0), i(JMP | JEQ, 1, 0, number), i(RET, 0, 0, allow), i(RET, 0, 0, 0x8000_0000)]
        };
        assert_eq!(run(&program(323), &CALL), 0x8000_0000);
        assert_eq!(run(&program(324), &CALL), allow);
    }

    #[test]
    fn arithmetic_memory_and_jumps_work() {
        let program = [
            i(LD | IMM, 0, 0, 40),
            i(ST, 0, 0, 3),
            i(LDX | MEM, 0, 0, 3),
            i(ALU | X, 0, 0, 0),       // a = 80
            i(ALU | 0x10, 0, 0, 5),    // a = 75
            i(JMP | JGE | X, 1, 0, 0), // 75 >= 40
            i(RET, 0, 0, 1),
            i(JMP | JA, 0, 0, 1),
            i(RET, 0, 0, 2),
            i(ALU | 0x30, 0, 0, 0), // division by zero
            i(RET | RET_A, 0, 0, 0),
        ];
        assert_eq!(run(&program, &CALL), KILL);
        assert_eq!(run(&program[..7], &CALL), KILL, "a program must not run out of its end");
    }
}
