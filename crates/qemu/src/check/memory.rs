//! Can all RAM be found and reached, and is QEMU the only one that writes it?

use super::Finding;
use crate::Error;
use crate::blocks::{blocks as find, other_mappings};
use crate::process;
use crate::vm::Vm;
use ram::{Backing, PAGE, Region, Store};

type Found = Result<Vec<Finding>, Error>;

/// Every block is mapped, and the files behind shared ones can be opened.
pub(super) fn blocks(test: &'static str, vm: &mut Vm) -> Found {
    let (layout, regions) = find(vm)?;
    let bytes = |shared: bool| -> u64 {
        let of = |region: &&Region| matches!(region.backing, Backing::Shared(_)) == shared;
        regions.iter().filter(of).map(|region| region.pages * PAGE as u64).sum()
    };
    let (private, shared) = (mib(bytes(false)), mib(bytes(true)));
    let text = format!("{} blocks: {private} private, {shared} shared", layout.len());
    let mut found = vec![Finding::ok(test, text)];
    for (id, block) in layout.iter() {
        let page_bytes = regions.iter().find_map(|region| match &region.backing {
            Backing::Shared(file) | Backing::PrivateFile(file) if region.block == id => match file.store {
                Store::Hugetlb { page_bytes } => Some(page_bytes),
                _ => None,
            },
            _ => None,
        });
        found.extend(page_bytes.map(|page_bytes| {
            let (name, page) = (&block.name, mib(page_bytes));
            let text =
                format!("block {name} is on huge pages: a guest that writes one byte has {page} sent again");
            Finding::warn(test, text, "none needed; more bandwidth if it does not converge")
        }));
    }
    Ok(found)
}

/// Writes through another mapping are not seen.
pub(super) fn other_writers(test: &'static str, vm: &mut Vm) -> Found {
    // Where RAM can't be found, the test of that says so.
    let Ok((layout, regions)) = find(vm) else { return Ok(Vec::new()) };
    let others = other_mappings(vm, &layout, &regions)?;
    if others.is_empty() {
        return Ok(vec![Finding::ok(test, "no other process can write this RAM")]);
    }
    let found = others.into_iter().map(|other| {
        let (block, pid, start) = (&other.block, other.pid, other.start);
        if pid == vm.pid() {
            let text = format!("QEMU has block {block} mapped a second time, at {start:#x}");
            return Finding::fail(test, text, "start QEMU without the device or object that does it");
        }
        let text =
            format!("process {pid} ({}) has block {block} mapped too and can write it unseen", other.process);
        Finding::fail(test, text, format!("end process {pid}, or what makes it share this RAM"))
    });
    Ok(found.collect())
}

/// Locked memory can't be given back, so nothing stays sparse.
pub(super) fn locked(test: &'static str, vm: &mut Vm) -> Found {
    let locked = process::status_field(vm.pid(), "VmLck").unwrap_or_default();
    let kib: u64 = locked.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or_default();
    Ok(vec![match kib {
        0 => Finding::ok(test, "no RAM is locked"),
        _ => Finding::warn(
            test,
            format!("{} of RAM are locked: pages the source never touched take memory here", mib(kib << 10)),
            "start the target without -overcommit mem-lock=on",
        ),
    }])
}

fn mib(bytes: u64) -> String {
    match bytes {
        0 => "none".into(),
        bytes if bytes < 1 << 20 => format!("{} KiB", bytes >> 10),
        bytes => format!("{} MiB", bytes >> 20),
    }
}
