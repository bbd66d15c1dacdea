//! Does a device write RAM behind QEMU's page tables, or need state that QEMU does not hand out?

use super::Finding;
use crate::Error;
use crate::vm::Vm;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

type Found = Result<Vec<Finding>, Error>;

/// Looks at the type of every device and object, by its own name.
pub(super) fn devices(test: &'static str, vm: &mut Vm) -> Found {
    let mut found = Vec::new();
    let mut count = 0;
    for folder in FOLDERS {
        for (name, kind) in vm.children(folder)? {
            count += usize::from(*folder != "/objects");
            if let Some(reason) = refusal(&kind) {
                let text = format!("{} ({kind}): {reason}", label(folder, &name));
                found.push(Finding::fail(
                    test,
                    text,
                    format!("unplug it before the move: device_del {name}"),
                ));
            }
            if kind.starts_with("virtio-balloon") {
                found.push(balloon(test, vm, folder, &name));
            }
        }
    }
    if !found.iter().any(|finding| finding.verdict == super::Verdict::Fail) {
        found.insert(0, Finding::ok(test, format!("{count} devices, all of which write through QEMU")));
    }
    Ok(found)
}

/// Backends of network devices have no object of their own.
pub(super) fn network(test: &'static str, vm: &mut Vm) -> Found {
    let text = vm.qmp().human("info network")?;
    let found: Vec<Finding> = text
        .lines()
        .filter_map(|line| {
            let (name, facts) = line.trim().trim_start_matches("\\ ").split_once(':')?;
            let kind = facts.split(',').find_map(|fact| fact.trim().strip_prefix("type="))?;
            let text = format!("network backend {name} ({kind}): {}", refusal(kind)?);
            Some(Finding::fail(test, text, "use a tap device, with vhost=on if you like"))
        })
        .collect();
    Ok(if found.is_empty() { vec![Finding::ok(test, "no backend writes RAM from elsewhere")] } else { found })
}

/// Whatever a device is called, to do DMA it holds a descriptor that tells.
pub(super) fn dma(test: &'static str, vm: &mut Vm) -> Found {
    let pid = vm.pid();
    let entries = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(entries) => entries,
        Err(error) => {
            let text = format!("the descriptors of process {pid} can't be seen: {error}");
            return Ok(vec![Finding::fail(test, text, "run as root or with CAP_SYS_PTRACE")]);
        }
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let link = fs::read_link(entry.path()).unwrap_or_default();
        let name = entry.file_name();
        let info =
            fs::read_to_string(Path::new(&format!("/proc/{pid}/fdinfo")).join(&name)).unwrap_or_default();
        let reason = dma_reason(&link.to_string_lossy(), &info);
        let (name, link) = (name.to_string_lossy(), link.display());
        found.extend(reason.map(|reason| {
            Finding::fail(
                test,
                format!("descriptor {name} ({link}): {reason}"),
                "unplug the device that uses it",
            )
        }));
    }
    Ok(if found.is_empty() {
        vec![Finding::ok(test, "no descriptor of a device that does DMA")]
    } else {
        found
    })
}

fn dma_reason(link: &str, info: &str) -> Option<&'static str> {
    let devices =
        ["/dev/vfio/", "/dev/vhost-vdpa", "/dev/vhost-scsi", "/dev/iommu", "/dev/infiniband/", "/dev/xdma"];
    if devices.iter().any(|device| link.starts_with(device)) {
        return Some("a device does DMA to RAM");
    }
    let buffers = info.lines().find_map(|line| line.strip_prefix("UserBufs:")?.trim().parse::<u64>().ok());
    (link.contains("[io_uring]") && buffers.is_some_and(|count| count > 0))
        .then_some("an io_uring with registered buffers writes RAM unseen")
}

/// Why a device, object or backend of this type can't be moved; none for one that can.
fn refusal(kind: &str) -> Option<&'static str> {
    REFUSED.iter().find(|(prefix, _)| kind.starts_with(prefix)).map(|(_, reason)| *reason)
}

fn balloon(test: &'static str, vm: &mut Vm, folder: &str, name: &str) -> Finding {
    let property = json!({ "path": format!("{folder}/{name}"), "property": "free-page-reporting" });
    let reporting = matches!(vm.qmp().execute("qom-get", property), Ok(Value::Bool(true)));
    let how = if reporting { " by itself (free page reporting)" } else { "" };
    let text = format!("{} gives memory back{how}: discards are looked for at the stop", label(folder, name));
    Finding::ok(test, text)
}

/// A device's id, or where it is if it has none.
fn label(folder: &str, name: &str) -> String {
    match folder {
        "/machine/peripheral" | "/objects" => format!("device {name}"),
        _ => format!("device {folder}/{name}"),
    }
}

/// Where QEMU keeps devices with an id, those without, those of the machine, and objects.
const FOLDERS: &[&str] =
    &["/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached", "/objects"];

/// Types by how they begin, the longest first, and why they can't be moved.
const REFUSED: &[(&str, &str)] = &[
    ("vfio", "a passed-through device writes RAM by DMA, unseen"),
    ("vhost-vdpa", "a vDPA device writes RAM by DMA, unseen"),
    ("vhost-user-fs", "virtiofsd writes RAM from its own process, unseen"),
    ("vhost-user", "its backend writes RAM from its own process, unseen"),
    ("cryptodev-vhost-user", "its backend writes RAM from its own process, unseen"),
    ("vhost-scsi", "the kernel's SCSI target writes RAM by DMA, unseen"),
    ("ivshmem", "it shares memory with other VMs"),
    ("x-pci-proxy", "another process writes RAM, unseen"),
    ("virtio-mem", "it plugs and unplugs RAM, which can't be followed yet"),
    ("sev-", "the guest's RAM is encrypted"),
    ("tdx-", "the guest's RAM is encrypted"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_refused_by_their_family_and_kernel_vhost_is_not() {
        let refused =
            ["vfio-pci", "vfio-pci-nohotplug", "vhost-user-fs-pci", "vhost-user-blk-pci", "vhost-vdpa"];
        assert!(refused.iter().all(|kind| refusal(kind).is_some()));
        assert!(refusal("vhost-user-fs-pci").unwrap().contains("virtiofsd"));
        let moved =
            ["virtio-net-pci", "vhost-vsock-pci", "tap", "virtio-balloon-pci", "virtio-scsi-pci", "nvme"];
        assert!(moved.iter().all(|kind| refusal(kind).is_none()));
    }

    #[test]
    fn descriptors_tell_of_dma() {
        assert!(dma_reason("/dev/vfio/12", "").is_some());
        assert!(dma_reason("/dev/vhost-net", "").is_none());
        let ring = "anon_inode:[io_uring]";
        assert!(dma_reason(ring, "SqThread:\t-1\nUserFiles:\t0\nUserBufs:\t2\n").is_some());
        assert!(dma_reason(ring, "SqThread:\t-1\nUserFiles:\t3\nUserBufs:\t0\n").is_none());
    }
}
