//! Reads `/proc/PID/maps`: which stretch of a process's addresses shows what.

use std::io;

/// One mapping of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vma {
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// Whether the process may write through it now.
    pub writable: bool,
    /// Whether writes reach the file and its other mappings.
    pub shared: bool,
    /// Offset in the file of the first byte.
    pub offset: u64,
    /// The file's device and inode as the kernel prints them; `00:00` and 0 without a file.
    pub file: FileId,
    /// Path or name, empty for anonymous memory.
    pub name: String,
}

/// Which file is behind a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// `major:minor` in hexadecimal.
    pub device: String,
    /// Inode number on that device.
    pub inode: u64,
}

impl Vma {
    /// Whether a file (or shared anonymous memory) is behind it.
    pub fn has_file(&self) -> bool {
        self.file.inode != 0
    }

    /// Where the kernel lets a file be opened that may have no path any more.
    pub fn map_file(&self, pid: i32) -> std::path::PathBuf {
        format!("/proc/{pid}/map_files/{:x}-{:x}", self.start, self.end).into()
    }
}

/// The mappings of a process, ascending. Fails with the kernel's error if it is gone or may not be read.
pub fn read(pid: i32) -> io::Result<Vec<Vma>> {
    let text = std::fs::read(format!("/proc/{pid}/maps"))?;
    Ok(String::from_utf8_lossy(&text).lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Vma> {
    // `7f00-7f01 rw-s 00001000 00:01 1043    /memfd:name (deleted)`; the name may hold spaces.
    let mut rest = line;
    let mut field = || {
        let (field, after) = rest.trim_start().split_once(' ').unwrap_or((rest.trim_start(), ""));
        rest = after;
        field
    };
    let (start, end) = field().split_once('-')?;
    let permissions = field();
    let offset = u64::from_str_radix(field(), 16).ok()?;
    let device = field().to_owned();
    let inode = field().parse().ok()?;
    Some(Vma {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        writable: permissions.contains('w'),
        shared: permissions.contains('s'),
        offset,
        file: FileId { device, inode },
        name: rest.trim_start().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_with_or_without_a_name_and_with_spaces_in_it() {
        let anonymous = parse("7fef25e00000-7fef25e01000 rw-p 00000000 00:00 0 ").unwrap();
        assert_eq!((anonymous.start, anonymous.end), (0x7fef_25e0_0000, 0x7fef_25e0_1000));
        assert!(
            anonymous.writable && !anonymous.shared && !anonymous.has_file() && anonymous.name.is_empty()
        );

        let memfd =
            "7fef2bed4000-7fef2c000000 rw-s 00001000 00:01 1043                       /memfd:a b (deleted)";
        let memfd = parse(memfd).unwrap();
        assert!(memfd.shared && memfd.has_file());
        assert_eq!((memfd.offset, memfd.file.inode), (0x1000, 1043));
        assert_eq!(memfd.name, "/memfd:a b (deleted)");
    }

    #[test]
    fn a_line_that_is_no_mapping_is_passed_over() {
        assert_eq!(parse(""), None);
        assert_eq!(parse("VmFlags: rd wr"), None);
        assert_eq!(parse("zz-12 rw-p 0 00:00 0"), None);
    }

    #[test]
    fn our_own_mappings_are_ascending_and_hold_our_code() {
        let own = read(std::process::id() as i32).unwrap();
        assert!(own.windows(2).all(|pair| pair[0].end <= pair[1].start));
        let code = our_code as *const () as u64;
        assert!(own.iter().any(|vma| (vma.start..vma.end).contains(&code)));
    }

    fn our_code() {}
}
