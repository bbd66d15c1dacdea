//! What is measured: what guest RAM holds, and where it lies.

use harness::{Backend, Guest};

/// What guest RAM holds when it is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// Written once, with zeros.
    Zero,
    /// Every second page is zero, the others are random.
    Half,
    /// Random.
    Random,
    /// Never touched.
    Untouched,
    /// As `half`, and the guest runs and writes.
    Running,
}

impl Case {
    /// In the order of the table.
    pub const ALL: [Case; 5] = [Case::Zero, Case::Half, Case::Random, Case::Untouched, Case::Running];

    /// As the table has it.
    pub fn name(self) -> &'static str {
        match self {
            Case::Zero => "zero",
            Case::Half => "half",
            Case::Random => "random",
            Case::Untouched => "untouched",
            Case::Running => "running",
        }
    }

    /// The guest that fills its RAM like this.
    pub fn guest(self) -> Guest {
        Guest::multiboot(match self {
            Case::Zero => "mode=idle fill=zero",
            Case::Half => "mode=idle fill=half",
            Case::Random => "mode=idle fill=random",
            Case::Untouched => "mode=idle",
            // 256 MiB, of which it checks and writes 78 MiB/s.
            Case::Running => "fill=half pages=65536 rate=20000",
        })
    }

    /// Whether the guest runs while it is moved.
    pub fn runs(self) -> bool {
        self == Case::Running
    }

    /// Whether a source can be moved again after it was moved. Its RAM must be as it was: QEMU's migration touches
    /// all that was untouched.
    pub fn keeps_source(self) -> bool {
        matches!(self, Case::Zero | Case::Half | Case::Random)
    }
}

/// Where guest RAM lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// A file on tmpfs, shared: whimbrel maps it as well.
    File,
    /// Plain `-m`: whimbrel copies it through the kernel.
    Anonymous,
}

impl Memory {
    /// In the order of the table.
    pub const ALL: [Memory; 2] = [Memory::File, Memory::Anonymous];

    /// As the table has it.
    pub fn name(self) -> &'static str {
        match self {
            Memory::File => "file",
            Memory::Anonymous => "anonymous",
        }
    }

    /// As the harness has it.
    pub fn backend(self) -> Backend {
        match self {
            Memory::File => Backend::File,
            Memory::Anonymous => Backend::Default,
        }
    }
}
