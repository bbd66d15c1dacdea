//! Whether RAM is still mapped where it was. A scan of memory that was unmapped says nothing at all, and one of
//! memory that was mapped anew is only refused; this tells which it was.

use crate::DirtyError;
use ram::{Layout, PAGE, Region};
use std::fmt;
use std::fs;
use std::ops::Range;

/// What the regions looked like at the start.
#[derive(Debug)]
pub(crate) struct Maps {
    pid: i32,
    regions: Vec<Seen>,
}

#[derive(Debug)]
struct Seen {
    block: String,
    addresses: Range<u64>,
    pieces: Behind,
}

/// What is behind an address: the same for every piece of a region, but for the offset.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Behind {
    device: String,
    inode: u64,
    /// Offset in the file minus the address, which neighbours of one file share. 0 without a file.
    slide: u64,
    shared: bool,
}

#[derive(Debug)]
struct Mapped {
    addresses: Range<u64>,
    writable: bool,
    behind: Behind,
}

impl Maps {
    /// Notes what the regions are. Fails if one isn't mapped.
    pub(crate) fn new<'a>(
        pid: i32,
        layout: &Layout,
        regions: impl Iterator<Item = &'a Region>,
    ) -> Result<Self, DirtyError> {
        let mapped = read(pid)?;
        let seen = regions.map(|region| {
            let block = layout.block(region.block).name.clone();
            let addresses = region.host..region.host + region.pages * PAGE as u64;
            let first = mapped.iter().find(|vma| vma.addresses.contains(&addresses.start));
            let Some(first) = first else {
                return Err(DirtyError::Unmapped { block, host: addresses.start });
            };
            Ok(Seen { block, addresses, pieces: first.behind.clone() })
        });
        let maps = Self { pid, regions: seen.collect::<Result<_, _>>()? };
        maps.compare(&mapped)?;
        Ok(maps)
    }

    /// Fails if a region isn't what it was, or if its file can be written through another mapping of the process.
    pub(crate) fn check(&self) -> Result<(), DirtyError> {
        self.compare(&read(self.pid)?)
    }

    fn compare(&self, mapped: &[Mapped]) -> Result<(), DirtyError> {
        self.regions.iter().try_for_each(|seen| seen.check(mapped))?;
        mapped.iter().filter(|vma| vma.writable && vma.behind.shared).try_for_each(|vma| self.check_once(vma))
    }

    /// A writable shared mapping is a region's or shows other bytes than every region.
    fn check_once(&self, vma: &Mapped) -> Result<(), DirtyError> {
        let second = self.regions.iter().find(|seen| seen.shows_bytes_of(vma));
        match second {
            Some(seen) => Err(DirtyError::Twice { block: seen.block.clone(), host: vma.addresses.start }),
            None => Ok(()),
        }
    }
}

impl Seen {
    fn check(&self, mapped: &[Mapped]) -> Result<(), DirtyError> {
        let mut next = self.addresses.start;
        let from = mapped.partition_point(|vma| vma.addresses.end <= next);
        for vma in &mapped[from..] {
            if next >= self.addresses.end || vma.addresses.start > next {
                break;
            }
            if vma.behind != self.pieces {
                return Err(DirtyError::Remapped {
                    block: self.block.clone(),
                    host: next,
                    was: self.pieces.to_string(),
                    now: vma.behind.to_string(),
                });
            }
            next = vma.addresses.end;
        }
        if next < self.addresses.end {
            return Err(DirtyError::Unmapped { block: self.block.clone(), host: next });
        }
        Ok(())
    }

    /// Whether `vma` shows bytes of this region's file at another address.
    fn shows_bytes_of(&self, vma: &Mapped) -> bool {
        let (here, there) = (&self.pieces, &vma.behind);
        let same_file = here.shared && (here.inode, &here.device) == (there.inode, &there.device);
        if !same_file || here.slide == there.slide {
            return false;
        }
        let mine = self.addresses.start.wrapping_add(here.slide)..self.addresses.end.wrapping_add(here.slide);
        let theirs =
            vma.addresses.start.wrapping_add(there.slide)..vma.addresses.end.wrapping_add(there.slide);
        mine.start < theirs.end && theirs.start < mine.end
    }
}

impl fmt::Display for Behind {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.shared { "shared" } else { "private" };
        match self.inode {
            0 => write!(to, "{how} anonymous memory"),
            inode => write!(to, "{how} memory of file {inode} on device {}", self.device),
        }
    }
}

fn read(pid: i32) -> Result<Vec<Mapped>, DirtyError> {
    let text = match fs::read_to_string(format!("/proc/{pid}/maps")) {
        Ok(text) => text,
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => String::new(),
        Err(source) => return Err(DirtyError::Maps { pid, source }),
    };
    let mapped: Vec<Mapped> = text.lines().filter_map(parse).collect();
    // A process that ended but was not waited for has an empty list.
    if mapped.is_empty() { Err(DirtyError::Gone { pid }) } else { Ok(mapped) }
}

/// A line like `7f12a0000000-7f12c0000000 rw-s 00000000 00:01 1026   /memfd:ram (deleted)`.
fn parse(line: &str) -> Option<Mapped> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let start = u64::from_str_radix(start, 16).ok()?;
    let end = u64::from_str_radix(end, 16).ok()?;
    let rights = words.next()?.as_bytes();
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let device = words.next()?.to_string();
    let inode: u64 = words.next()?.parse().ok()?;
    let slide = if inode == 0 { 0 } else { offset.wrapping_sub(start) };
    let shared = rights.get(3) == Some(&b's');
    Some(Mapped {
        addresses: start..end,
        writable: rights.get(1) == Some(&b'w'),
        behind: Behind { device, inode, slide, shared },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ram::{Backing, Block, BlockId};

    fn layout() -> Layout {
        Layout::new(vec![Block { name: "ram".into(), used_bytes: 0x4000, page_bytes: 4096 }]).unwrap()
    }

    fn maps(text: &str) -> Vec<Mapped> {
        text.lines().filter_map(parse).collect()
    }

    fn seen(text: &str) -> Maps {
        let behind = maps(text)[0].behind.clone();
        let seen = Seen { block: "ram".into(), addresses: 0x10000..0x14000, pieces: behind };
        Maps { pid: 1, regions: vec![seen] }
    }

    const WHOLE: &str = "10000-14000 rw-s 00001000 00:01 1026 /memfd:ram (deleted)";

    #[test]
    fn a_region_that_was_split_is_what_it_was() {
        let split = "10000-12000 rw-s 00001000 00:01 1026 /memfd:ram\n12000-18000 r--s 00003000 00:01 1026 /memfd:ram";
        assert!(seen(WHOLE).compare(&maps(split)).is_ok());
    }

    #[test]
    fn a_hole_in_a_region_is_named_by_its_address() {
        let holed = "10000-12000 rw-s 00001000 00:01 1026 /memfd:ram\n13000-14000 rw-s 00004000 00:01 1026 /memfd:ram";
        let error = seen(WHOLE).compare(&maps(holed)).unwrap_err();
        assert!(matches!(error, DirtyError::Unmapped { host: 0x12000, .. }), "{error}");
    }

    #[test]
    fn other_memory_in_place_of_a_region_is_an_error() {
        for other in [
            "10000-14000 rw-s 00002000 00:01 1026 /memfd:ram",
            "10000-14000 rw-s 00001000 00:01 1027 /memfd:ram",
            "10000-14000 rw-p 00001000 00:01 1026 /memfd:ram",
            "10000-14000 rw-p 00000000 00:00 0 ",
        ] {
            let error = seen(WHOLE).compare(&maps(other)).unwrap_err();
            assert!(matches!(error, DirtyError::Remapped { host: 0x10000, .. }), "{error}");
        }
    }

    #[test]
    fn a_second_mapping_of_the_same_bytes_is_an_error_and_one_of_others_is_not() {
        let with = |line: &str| seen(WHOLE).compare(&maps(&format!("{WHOLE}\n{line}")));
        let error = with("20000-21000 rw-s 00004000 00:01 1026 /memfd:ram").unwrap_err();
        assert!(matches!(error, DirtyError::Twice { host: 0x20000, .. }), "{error}");
        assert!(with("20000-21000 rw-s 00005000 00:01 1026 /memfd:ram").is_ok());
        assert!(with("20000-21000 r--s 00004000 00:01 1026 /memfd:ram").is_ok());
        assert!(with("20000-21000 rw-p 00004000 00:01 1026 /memfd:ram").is_ok());
    }

    #[test]
    fn a_region_that_was_never_mapped_is_refused() {
        let region =
            Region { block: BlockId(0), first_page: 0, pages: 4, host: 0x1000, backing: Backing::Anonymous };
        let error =
            Maps::new(std::process::id() as i32, &layout(), [region].iter()).expect_err("nothing is there");
        assert!(matches!(error, DirtyError::Unmapped { host: 0x1000, .. }), "{error}");
    }
}
