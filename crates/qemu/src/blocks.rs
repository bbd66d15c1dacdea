//! Finds a QEMU's RAM: `info ramblock` says where each block is, `/proc/PID/maps` what is behind it.

use crate::maps::{self, FileId, Vma};
use crate::process;
use crate::qmp::QmpError;
use crate::vm::Vm;
use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};
use ram::{Backing, Block, BlockId, File, Layout, LayoutError, PAGE, Region, Store};
use std::io;
use std::path::PathBuf;

/// The RAM blocks of a QEMU and where they sit in its process: everything that is guest state, ROMs and video
/// memory included. Fails if a block is not mapped as QEMU says.
pub fn blocks(vm: &mut Vm) -> Result<(Layout, Vec<Region>), BlocksError> {
    let listed = parse(&vm.qmp().human("info ramblock")?)?;
    let pid = vm.pid();
    let vmas = maps::read(pid).map_err(|source| BlocksError::Maps { pid, source })?;
    let layout = Layout::new(listed.iter().map(|line| line.block.clone()).collect())?;
    let mut regions = Vec::new();
    for ((id, _), line) in layout.iter().zip(&listed) {
        cover(pid, &vmas, id, line, &mut regions)?;
    }
    Ok((layout, regions))
}

/// A block as `info ramblock` lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    block: Block,
    host: u64,
}

/// Reads `info ramblock`. Blocks without a name are no guest state: QEMU does not migrate them either.
fn parse(text: &str) -> Result<Vec<Line>, BlocksError> {
    if !text.lines().next().is_some_and(|header| header.contains("Block Name") && header.contains("HVA")) {
        return Err(BlocksError::NoAddresses);
    }
    let lines = text.lines().skip(1).filter(|line| !line.trim().is_empty());
    let read = lines.map(|line| parse_line(line).ok_or_else(|| BlocksError::Line { line: line.into() }));
    let named = read.filter(|line| line.as_ref().map_or(true, |line| !line.block.name.is_empty()));
    named.collect()
}

/// Reads `NAME  4 KiB  0xOFFSET 0xUSED 0xTOTAL 0xHOST  rw`. A name may hold spaces, and later versions may
/// append columns, so the four wide numbers in the middle are what is looked for.
fn parse_line(line: &str) -> Option<Line> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let numbers =
        |at: usize| words[at..at + 4].iter().map(|word| wide_number(word)).collect::<Option<Vec<_>>>();
    let (at, numbers) = (0..words.len().saturating_sub(3)).find_map(|at| Some((at, numbers(at)?)))?;
    let &[_offset, used_bytes, _total, host] = numbers.as_slice() else { return None };
    let unit_at = at.checked_sub(1)?;
    let page_bytes =
        words[unit_at.checked_sub(1)?].parse::<u64>().ok()?.checked_mul(unit(words[unit_at])?)?;
    let name_bytes = words[unit_at - 1].as_ptr() as usize - line.as_ptr() as usize;
    let name = line[..name_bytes].trim().to_owned();
    Some(Line { block: Block { name, used_bytes, page_bytes }, host })
}

/// A number as QEMU prints addresses: `0x` and 16 digits.
fn wide_number(word: &str) -> Option<u64> {
    let digits = word.strip_prefix("0x").filter(|digits| digits.len() == 16)?;
    u64::from_str_radix(digits, 16).ok()
}

fn unit(word: &str) -> Option<u64> {
    match word {
        "B" => Some(1),
        "KiB" => Some(1 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        _ => None,
    }
}

/// Appends the regions that cover the block, in order and without gaps.
fn cover(
    pid: i32,
    vmas: &[Vma],
    id: BlockId,
    line: &Line,
    regions: &mut Vec<Region>,
) -> Result<(), BlocksError> {
    let block = line.block.name.clone();
    let end = line.host.checked_add(line.block.used_bytes);
    let Some(end) = end.filter(|_| line.host.is_multiple_of(PAGE as u64)) else {
        return Err(BlocksError::Unmapped { block, pid, at: line.host });
    };
    let mut at = line.host;
    while at < end {
        let Some(vma) = vmas.iter().find(|vma| (vma.start..vma.end).contains(&at)) else {
            return Err(BlocksError::Unmapped { block, pid, at });
        };
        let until = vma.end.min(end);
        regions.push(Region {
            block: id,
            first_page: (at - line.host) / PAGE as u64,
            pages: (until - at) / PAGE as u64,
            host: at,
            backing: backing(pid, vma, at, &block)?,
        });
        at = until;
    }
    Ok(())
}

fn backing(pid: i32, vma: &Vma, at: u64, block: &str) -> Result<Backing, BlocksError> {
    if !vma.has_file() {
        return Ok(Backing::Anonymous);
    }
    let path = vma.map_file(pid);
    let store = store(&path).map_err(|source| BlocksError::MapFile {
        block: block.into(),
        path: path.clone(),
        source,
    })?;
    let file = File { path, name: vma.name.clone(), offset: vma.offset + (at - vma.start), store };
    Ok(if vma.shared { Backing::Shared(file) } else { Backing::PrivateFile(file) })
}

/// Asks the file system, which knows memfds and shared anonymous memory as tmpfs or hugetlbfs too.
fn store(path: &std::path::Path) -> io::Result<Store> {
    let found = statfs(path)?;
    Ok(match found.filesystem_type() {
        TMPFS_MAGIC => Store::Shmem,
        HUGETLBFS_MAGIC => Store::Hugetlb { page_bytes: found.block_size() as u64 },
        _ => Store::Disk,
    })
}

/// A second way to write a RAM block, which tracking of QEMU's own mapping does not see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherMapping {
    /// The RAM block's name.
    pub block: String,
    /// The process that has it mapped; may be QEMU itself.
    pub pid: i32,
    /// That process's short name.
    pub process: String,
    /// The mapping's first address there.
    pub start: u64,
}

/// Writable shared mappings of the files behind `regions`, in any process that we may look at, other than the
/// regions themselves and our own.
pub fn other_mappings(
    vm: &Vm,
    layout: &Layout,
    regions: &[Region],
) -> Result<Vec<OtherMapping>, BlocksError> {
    let pid = vm.pid();
    let vmas = maps::read(pid).map_err(|source| BlocksError::Maps { pid, source })?;
    let extents: Vec<Extent> = regions.iter().filter_map(|region| extent(layout, &vmas, region)).collect();
    let mut found = Vec::new();
    if extents.is_empty() {
        return Ok(found);
    }
    for pid in processes().filter(|&pid| pid != std::process::id() as i32) {
        // A process that ended meanwhile or that we may not read is no error here.
        for vma in maps::read(pid).unwrap_or_default().iter().filter(|vma| vma.shared && vma.writable) {
            let hit =
                extents.iter().find(|extent| extent.is_reached_by(vma) && !extent.is(vm.pid(), pid, vma));
            found.extend(hit.map(|extent| OtherMapping {
                block: extent.block.clone(),
                pid,
                process: process::name(pid),
                start: vma.start,
            }));
        }
    }
    Ok(found)
}

/// A stretch of a file that is guest RAM.
struct Extent {
    block: String,
    file: FileId,
    offset: u64,
    bytes: u64,
    host: u64,
}

impl Extent {
    fn is_reached_by(&self, vma: &Vma) -> bool {
        let vma_end = vma.offset.saturating_add(vma.end - vma.start);
        vma.file == self.file && vma.offset < self.offset + self.bytes && self.offset < vma_end
    }

    /// Whether `vma` is the mapping that QEMU itself uses.
    fn is(&self, qemu: i32, pid: i32, vma: &Vma) -> bool {
        pid == qemu && (vma.start..vma.end).contains(&self.host)
    }
}

fn extent(layout: &Layout, vmas: &[Vma], region: &Region) -> Option<Extent> {
    let (Backing::Shared(file) | Backing::PrivateFile(file)) = &region.backing else { return None };
    let vma = vmas.iter().find(|vma| (vma.start..vma.end).contains(&region.host) && vma.has_file())?;
    Some(Extent {
        block: layout.block(region.block).name.clone(),
        file: vma.file.clone(),
        offset: file.offset,
        bytes: region.pages * PAGE as u64,
        host: region.host,
    })
}

/// Every process in sight.
fn processes() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Why a VM's RAM can't be found.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum BlocksError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("QEMU's `info ramblock` shows no host addresses; QEMU 8.0 and newer do")]
    NoAddresses,
    #[error("QEMU's `info ramblock` has a line that can't be read: {line:?}")]
    Line { line: String },
    #[error("cannot read the mappings of process {pid}: run as root or with CAP_SYS_PTRACE")]
    Maps { pid: i32, source: io::Error },
    #[error(
        "RAM block {block} is not mapped at {at:#x} in process {pid}: is that process the QEMU behind the monitor?"
    )]
    Unmapped { block: String, pid: i32, at: u64 },
    #[error("cannot reach the file behind RAM block {block} by {path}: run as root or with CAP_SYS_ADMIN")]
    MapFile { block: String, path: PathBuf, source: io::Error },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As QEMU 10.0.2 prints it, shortened.
    const V10: &str = "\
              Block Name    PSize              Offset               Used              Total                HVA  RO
                  pc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000 0x00007fef27e00000  rw
   0000:00:01.0/vga.vram    4 KiB  0x0000000004080000 0x0000000001000000 0x0000000001000000 0x00007fef26a00000  rw
    /rom@etc/acpi/tables    4 KiB  0x0000000005100000 0x0000000000020000 0x0000000000200000 0x00007fef26200000  ro
0000:00:02.0/virtio-net-pci.rom    4 KiB  0x00000000050c0000 0x0000000000040000 0x0000000000040000 0x00007fef26600000  ro
";

    fn line(name: &str, used_bytes: u64, page_bytes: u64, host: u64) -> Line {
        Line { block: Block { name: name.into(), used_bytes, page_bytes }, host }
    }

    #[test]
    fn used_sizes_count_and_long_names_push_nothing_aside() {
        let lines = parse(V10).unwrap();
        assert_eq!(lines[0], line("pc.ram", 0x400_0000, 4096, 0x7fef_27e0_0000));
        assert_eq!(lines[2], line("/rom@etc/acpi/tables", 0x2_0000, 4096, 0x7fef_2620_0000));
        assert_eq!(lines[3], line("0000:00:02.0/virtio-net-pci.rom", 0x4_0000, 4096, 0x7fef_2660_0000));
    }

    #[test]
    fn huge_pages_names_with_spaces_and_later_columns_are_read() {
        let text = "Block Name PSize Offset Used Total HVA RO NEW\n \
            my ram 2 MiB 0x0000000000000000 0x0000000000200000 0x0000000000400000 0x00007f0000000000 rw 17\n";
        assert_eq!(parse(text).unwrap(), [line("my ram", 0x20_0000, 2 << 20, 0x7f00_0000_0000)]);
    }

    #[test]
    fn a_block_without_a_name_is_passed_over() {
        let text = "Block Name PSize Offset Used Total HVA RO\n \
            4 KiB 0x0000000000000000 0x0000000000200000 0x0000000000400000 0x00007f0000000000 rw\n";
        assert_eq!(parse(text).unwrap(), []);
    }

    #[test]
    fn a_list_without_addresses_is_refused_as_too_old() {
        let old =
            "              Block Name    PSize              Offset               Used              Total\n";
        assert!(matches!(parse(old), Err(BlocksError::NoAddresses)));
        assert!(matches!(parse(""), Err(BlocksError::NoAddresses)));
    }

    #[test]
    fn a_line_that_makes_no_sense_is_refused_whole() {
        for bad in [
            "x",
            "pc.ram 4 KiB 0x0 0x0 0x0",
            "pc.ram 4 XiB 0x0000000000000000 0x0000000000000000 0x0000000000000000 0x0000000000000000",
            "0x0000000000000000 0x0000000000000000 0x0000000000000000 0x0000000000000000",
        ] {
            let text = format!("Block Name HVA\n{bad}\n");
            assert!(matches!(parse(&text), Err(BlocksError::Line { .. })), "{bad}");
        }
    }

    fn vma(start: u64, end: u64) -> Vma {
        let file = FileId { device: "00:00".into(), inode: 0 };
        Vma { start, end, writable: true, shared: false, offset: 0, file, name: String::new() }
    }

    #[test]
    fn a_block_may_span_several_mappings_but_no_gap() {
        let vmas = [vma(0x1000, 0x3000), vma(0x3000, 0x8000), vma(0x9000, 0xa000)];
        let mut regions = Vec::new();
        cover(1, &vmas, BlockId(4), &line("ram", 0x5000, 4096, 0x2000), &mut regions).unwrap();
        let found: Vec<_> =
            regions.iter().map(|region| (region.first_page, region.pages, region.host)).collect();
        assert_eq!(found, [(0, 1, 0x2000), (1, 4, 0x3000)]);

        let gap = cover(1, &vmas, BlockId(4), &line("ram", 0x8000, 4096, 0x2000), &mut regions);
        assert!(matches!(gap, Err(BlocksError::Unmapped { at: 0x8000, .. })));
    }

    #[test]
    fn a_block_at_the_end_of_all_addresses_is_refused() {
        let mut regions = Vec::new();
        let wild = cover(1, &[], BlockId(0), &line("ram", 0x2000, 4096, u64::MAX - 0xfff), &mut regions);
        assert!(matches!(wild, Err(BlocksError::Unmapped { .. })));
    }
}
