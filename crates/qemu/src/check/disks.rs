//! Do disks write RAM behind QEMU's page tables, or have state of their own that does not travel?

use super::Finding;
use crate::Error;
use crate::vm::Vm;
use serde_json::{Value, json};

type Found = Result<Vec<Finding>, Error>;

/// It works with direct I/O, and costs.
pub(super) fn direct_io(test: &'static str, vm: &mut Vm) -> Found {
    let nodes = vm.direct_io_nodes()?;
    Ok(vec![match nodes.is_empty() {
        true => Finding::ok(test, "no disk bypasses the page cache"),
        false => Finding::warn(
            test,
            format!(
                "{} bypasses the page cache: the VM pauses twice more, until its disk requests are done, and \
                 pages they may have filled are sent again",
                nodes.join(", ")
            ),
            "none needed; without the cost: cache.direct=off",
        ),
    }])
}

/// Bitmaps, jobs and exports stay behind; drivers of another kernel or process write RAM unseen.
pub(super) fn disks(test: &'static str, vm: &mut Vm) -> Found {
    let mut found = Vec::new();
    let nodes = vm.qmp().execute("query-named-block-nodes", json!({ "flat": true }))?;
    let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
    for node in nodes {
        let name = text(&node["node-name"]);
        found.extend(driver(test, &name, &text(&node["drv"])));
        for bitmap in node["dirty-bitmaps"].as_array().into_iter().flatten() {
            let bitmap = text(&bitmap["name"]);
            found.push(Finding::fail(
                test,
                format!("dirty bitmap {bitmap:?} of node {name} would be lost"),
                format!(
                    "remove it (block-dirty-bitmap-remove {name} {bitmap}); the next backup is a full one"
                ),
            ));
        }
    }
    let jobs = vm.qmp().execute("query-block-jobs", json!({}))?;
    for job in jobs.as_array().into_iter().flatten() {
        let (kind, name) = (text(&job["type"]), text(&job["device"]));
        found.push(Finding::fail(
            test,
            format!("block job {name} ({kind}) is running and would keep its disk at the source"),
            format!("let it end, or end it: block-job-cancel {name}"),
        ));
    }
    let exports = vm.qmp().execute("query-block-exports", json!({}))?;
    for export in exports.as_array().into_iter().flatten() {
        let (id, node) = (text(&export["id"]), text(&export["node-name"]));
        found.push(Finding::fail(
            test,
            format!("node {node} is exported (by {id}) and would be kept at the source"),
            format!("end the export: block-export-del {id}"),
        ));
    }
    if found.is_empty() {
        found.push(Finding::ok(
            test,
            format!("{} block nodes, without bitmaps, jobs and exports", nodes.len()),
        ));
    }
    Ok(found)
}

fn driver(test: &'static str, node: &str, driver: &str) -> Option<Finding> {
    WRITES_UNSEEN.contains(&driver).then(|| {
        let text = format!("node {node} ({driver}): its driver has RAM registered and writes it unseen");
        Finding::fail(test, text, "use the disk through the host's kernel: driver host_device")
    })
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("?").to_owned()
}

/// QEMU's own NVMe driver uses VFIO; the others are libblkio's, which register guest RAM.
const WRITES_UNSEEN: &[&str] = &[
    "io_uring",
    "nvme",
    "nvme-io_uring",
    "virtio-blk-vfio-pci",
    "virtio-blk-vhost-user",
    "virtio-blk-vhost-vdpa",
];
