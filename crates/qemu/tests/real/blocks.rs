//! Where the RAM of a real QEMU is, with every kind of backend.

use crate::bed::{qemu_or_skip, read};
use ram::{Backing, BlockId, Layout, PAGE, Region, Store};
use std::fs::File;
use whimbrel_qemu::{Vm, blocks, other_mappings};

/// The regions cover every block without a gap, and the memory behind them can be read.
fn check_cover(vm: &Vm, layout: &Layout, regions: &[Region]) {
    for (id, block) in layout.iter() {
        let mut next = 0;
        for region in regions.iter().filter(|region| region.block == id) {
            assert_eq!(region.first_page, next, "{}", block.name);
            next += region.pages;
            read(vm.pid(), region.host, &mut [0; 16]);
            read(vm.pid(), region.host + region.pages * PAGE as u64 - 16, &mut [0; 16]);
        }
        assert_eq!(next, block.pages(), "{}", block.name);
    }
}

fn backing<'a>(layout: &Layout, regions: &'a [Region], name: &str) -> &'a Backing {
    let id = layout.find(name).unwrap_or_else(|| panic!("no block {name} in {layout:?}"));
    &regions.iter().find(|region| region.block == id).unwrap().backing
}

#[test]
fn private_memory_is_anonymous_and_firmware_is_a_block_too() {
    let qemu = qemu_or_skip!("-M", "q35", "-m", "64", "-vga", "std", "-device", "virtio-net-pci");
    let mut vm = qemu.connect();
    let (layout, regions) = blocks(&mut vm).unwrap();
    check_cover(&vm, &layout, &regions);
    assert_eq!(layout.block(BlockId(0)).name, "pc.ram");
    assert_eq!(layout.block(BlockId(0)).used_bytes, 64 << 20);
    assert_eq!(backing(&layout, &regions, "pc.ram"), &Backing::Anonymous);
    for name in ["pc.bios", "/rom@etc/acpi/tables", "0000:00:01.0/vga.vram"] {
        assert!(layout.find(name).is_some(), "{name} of {layout:?}");
    }
}

#[test]
fn every_backend_is_told_from_the_others() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = tempfile::tempdir_in("/var/tmp").unwrap();
    let object = |text: String| [String::from("-object"), format!("memory-backend-{text},size=16M")];
    let file = |id: &str, dir: &tempfile::TempDir, share: &str| {
        object(format!("file,id={id},mem-path={}/{id},share={share}", dir.path().display()))
    };
    let objects = [
        object("memfd,id=memfd,share=on".into()),
        object("ram,id=shared,share=on".into()),
        file("tmpfs", &dir, "on"),
        file("private", &dir, "off"),
        file("disk", &disk, "on"),
    ];
    // Four nodes and DIMMs would need a guest; as NUMA nodes all of them are RAM from the start.
    let mut options: Vec<String> = ["-M", "q35", "-m", "80", "-smp", "5"].map(String::from).into();
    for (node, (object, id)) in
        objects.into_iter().zip(["memfd", "shared", "tmpfs", "private", "disk"]).enumerate()
    {
        options.extend(object);
        options.extend(["-numa".into(), format!("node,nodeid={node},cpus={node},memdev={id}")]);
    }
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let Some(qemu) = crate::bed::Qemu::start(&options) else {
        return println!("SKIPPED {}: no QEMU", module_path!());
    };
    let mut vm = qemu.connect();
    let (layout, regions) = blocks(&mut vm).unwrap();
    check_cover(&vm, &layout, &regions);

    let store = |name: &str| match backing(&layout, &regions, name) {
        Backing::Shared(file) => {
            assert!(File::open(&file.path).is_ok(), "{:?}", file.path);
            file.store
        }
        other => panic!("{name} is {other:?}"),
    };
    assert_eq!(store("memfd"), Store::Shmem);
    assert_eq!(store("shared"), Store::Shmem);
    assert_eq!(store("tmpfs"), Store::Shmem);
    assert_eq!(store("disk"), Store::Disk);
    let private = backing(&layout, &regions, "private");
    assert!(matches!(private, Backing::PrivateFile(file) if file.store == Store::Shmem), "{private:?}");
}

#[test]
fn huge_pages_are_known_with_their_size() {
    let Some(_taken) = HugePages::take(16) else {
        return println!("SKIPPED {}: no huge pages to be had", module_path!());
    };
    let backend = "memory-backend-memfd,id=huge,size=16M,hugetlb=on,hugetlbsize=2M,share=on";
    let qemu = qemu_or_skip!("-M", "q35,memory-backend=huge", "-m", "16", "-object", backend);
    let mut vm = qemu.connect();
    let (layout, regions) = blocks(&mut vm).unwrap();
    check_cover(&vm, &layout, &regions);
    assert_eq!(layout.block(layout.find("huge").unwrap()).page_bytes, 2 << 20);
    let huge = backing(&layout, &regions, "huge");
    let Backing::Shared(file) = huge else { panic!("{huge:?}") };
    assert_eq!(file.store, Store::Hugetlb { page_bytes: 2 << 20 });
}

/// Huge pages taken for a test, and given back. Others may take some too, so only the difference counts.
struct HugePages {
    pages: u64,
}

impl HugePages {
    const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    fn take(pages: u64) -> Option<Self> {
        let before = Self::total()?;
        std::fs::write(Self::POOL, (before + pages).to_string()).ok()?;
        let taken = Self { pages: Self::total()?.saturating_sub(before) };
        (taken.pages >= pages).then_some(taken)
    }

    fn total() -> Option<u64> {
        std::fs::read_to_string(Self::POOL).ok()?.trim().parse().ok()
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let left = Self::total().unwrap_or_default().saturating_sub(self.pages);
        let _ = std::fs::write(Self::POOL, left.to_string());
    }
}

#[test]
fn another_process_with_the_ram_mapped_is_found_by_its_pid() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("ram");
    let backend = format!("memory-backend-file,id=mem,size=16M,share=on,mem-path={}", path.display());
    let qemu = qemu_or_skip!("-M", "q35,memory-backend=mem", "-m", "16", "-object", backend, "-S");
    let mut vm = qemu.connect();
    let (layout, regions) = blocks(&mut vm).unwrap();
    assert_eq!(other_mappings(&vm, &layout, &regions).unwrap(), []);

    let backend = format!("memory-backend-file,id=other,size=8M,share=on,mem-path={}", path.display());
    let other = qemu_or_skip!("-m", "32", "-object", backend, "-S");
    let found = other_mappings(&vm, &layout, &regions).unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].block.as_str(), found[0].pid), ("mem", other.pid()));
    assert!(found[0].process.starts_with("qemu-system"), "{found:?}");
}

#[test]
fn a_second_mapping_in_qemu_itself_is_found() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let backend = |id: &str| {
        let path = dir.path().join("ram");
        format!("memory-backend-file,id={id},size=16M,share=on,mem-path={}", path.display())
    };
    let options = ["-M", "q35,memory-backend=mem", "-m", "16", "-S"];
    let qemu = qemu_or_skip!(
        options[0],
        options[1],
        options[2],
        options[3],
        options[4],
        "-object",
        backend("mem"),
        "-object",
        backend("twin"),
    );
    let mut vm = qemu.connect();
    let (layout, regions) = blocks(&mut vm).unwrap();
    let found = other_mappings(&vm, &layout, &regions).unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].block.as_str(), found[0].pid), ("mem", qemu.pid()));
}
