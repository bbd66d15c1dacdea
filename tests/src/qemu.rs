//! Which QEMU the tests use, and what it can do on this machine.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use crate::Error;

/// Who runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// QEMU's translator; works everywhere.
    Tcg,
    /// The kernel; needs /dev/kvm.
    Kvm,
}

/// QEMU's version, as in 10.0.2. Orders as one expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl Accel {
    /// Both, for tests that loop over them.
    pub const ALL: [Accel; 2] = [Accel::Tcg, Accel::Kvm];

    /// As QEMU names it.
    pub fn name(self) -> &'static str {
        match self {
            Accel::Tcg => "tcg",
            Accel::Kvm => "kvm",
        }
    }

    /// Fails where this machine does not have it.
    pub(crate) fn check(self) -> Result<(), Error> {
        if self == Accel::Kvm
            && let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm")
        {
            return Err(Error::missing(format!("no KVM: can't open /dev/kvm: {error}")));
        }
        Ok(())
    }
}

/// The QEMU under test: `WHIMBREL_QEMU`, else the one on the path.
pub(crate) fn program() -> PathBuf {
    std::env::var_os("WHIMBREL_QEMU").unwrap_or_else(|| "qemu-system-x86_64".into()).into()
}

/// The version of the QEMU under test. Printed once, so that a test log says what was tested.
///
/// Fails with [`Error::Missing`] where there is no QEMU.
pub fn version() -> Result<Version, Error> {
    static VERSION: OnceLock<Result<Version, String>> = OnceLock::new();
    VERSION.get_or_init(ask_version).clone().map_err(Error::missing)
}

fn ask_version() -> Result<Version, String> {
    let program = program();
    let program = program.display();
    let output = Command::new(program.to_string())
        .arg("--version")
        .output()
        .map_err(|error| format!("no QEMU: {program}: {error} (run `make deps`, or set WHIMBREL_QEMU)"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version =
        parse_version(&text).ok_or_else(|| format!("no QEMU: {program} --version says {text:?}"))?;
    eprintln!("QEMU under test: {program}, {}", text.lines().next().unwrap_or_default());
    Ok(version)
}

fn parse_version(text: &str) -> Option<Version> {
    let digits = text
        .split("version ")
        .nth(1)?
        .split(|letter: char| letter != '.' && !letter.is_ascii_digit())
        .next()?;
    let mut parts = digits.split('.').map(|part| part.parse().ok());
    Some(Version(parts.next()??, parts.next()??, parts.next().flatten().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_what_qemu_prints() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)\nCopyright";
        assert_eq!(parse_version(text), Some(Version(10, 0, 2)));
        assert_eq!(parse_version("QEMU emulator version 8.0.0"), Some(Version(8, 0, 0)));
        assert_eq!(parse_version("bash: not found"), None);
    }
}
