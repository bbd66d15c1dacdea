//! Preflight against real QEMUs with something in the way.

use crate::bed::{Puppet, Qemu, qemu_or_skip, wait_for};
use serde_json::json;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use whimbrel_qemu::check::{Finding, Verdict, source, target};

/// The texts of what failed.
fn failed(findings: &[Finding]) -> Vec<&str> {
    let failed = findings.iter().filter(|finding| finding.verdict == Verdict::Fail);
    failed.inspect(|finding| assert!(finding.fix.is_some(), "{finding:?}")).map(|f| f.text.as_str()).collect()
}

/// The one text that failed.
fn only_failure(findings: &[Finding]) -> &str {
    let failed = failed(findings);
    assert_eq!(failed.len(), 1, "{failed:?}");
    failed[0]
}

fn all_lines_are_single(findings: &[Finding]) {
    assert!(findings.iter().all(|finding| !finding.text.contains('\n')), "{findings:?}");
}

/// An empty disk image that allows direct I/O.
fn image(dir: &Path) -> String {
    let path = dir.join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    path.display().to_string()
}

#[test]
fn an_ordinary_vm_passes_with_a_finding_for_every_test() {
    let qemu = qemu_or_skip!(
        "-M",
        "q35",
        "-vga",
        "std",
        "-device",
        "virtio-balloon-pci,id=bal,free-page-reporting=on"
    );
    let findings = source(&mut qemu.connect());
    assert_eq!(failed(&findings), [] as [&str; 0]);
    all_lines_are_single(&findings);
    let balloon = findings.iter().find(|finding| finding.text.contains("device bal")).unwrap();
    assert!(balloon.text.contains("free page reporting"), "{balloon:?}");
    assert!(findings.iter().all(|finding| finding.verdict == Verdict::Ok), "{findings:?}");
    let tests: std::collections::HashSet<&str> = findings.iter().map(|finding| finding.test).collect();
    assert_eq!(tests.len(), 15, "{tests:?}");
}

#[test]
fn a_waiting_target_passes_and_a_running_one_does_not() {
    let waiting = qemu_or_skip!("-incoming", "defer");
    assert_eq!(failed(&target(&mut waiting.connect())), [] as [&str; 0]);
    assert!(only_failure(&source(&mut waiting.connect())).contains("waits for a VM"));
    let running = qemu_or_skip!();
    assert!(only_failure(&target(&mut running.connect())).contains("does not wait with -incoming defer"));
}

#[test]
fn a_target_that_expects_another_stream_is_found() {
    let qemu = qemu_or_skip!("-incoming", "defer");
    let mut vm = qemu.connect();
    let on = json!({ "capabilities": [{ "capability": "multifd", "state": true }] });
    vm.qmp().execute("migrate-set-capabilities", on).unwrap();
    assert!(only_failure(&target(&mut vm)).contains("multifd"));
}

#[test]
fn direct_io_is_a_warning_that_names_the_node_and_the_cost() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = format!("driver=file,node-name=fast,filename={},cache.direct=on", image(dir.path()));
    let qemu = qemu_or_skip!("-blockdev", node, "-device", "virtio-blk-pci,drive=fast");
    let findings = source(&mut qemu.connect());
    assert_eq!(failed(&findings), [] as [&str; 0]);
    let warned: Vec<_> = findings.iter().filter(|finding| finding.verdict == Verdict::Warn).collect();
    assert!(matches!(warned[..], [warning] if warning.text.starts_with("fast bypasses")), "{warned:?}");
}

#[test]
fn a_dirty_bitmap_and_an_export_are_named() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let node = format!("driver=file,node-name=disk,filename={}", image(dir.path()));
    let qemu = qemu_or_skip!("-blockdev", node, "-device", "virtio-blk-pci,drive=disk");
    let mut vm = qemu.connect();
    vm.qmp().execute("block-dirty-bitmap-add", json!({ "node": "disk", "name": "nightly" })).unwrap();
    let bitmap = source(&mut vm);
    assert_eq!(only_failure(&bitmap), "dirty bitmap \"nightly\" of node disk would be lost");
    vm.qmp().execute("block-dirty-bitmap-remove", json!({ "node": "disk", "name": "nightly" })).unwrap();

    let path = qemu.dir().join("nbd").display().to_string();
    let address = json!({ "addr": { "type": "unix", "data": { "path": path } } });
    vm.qmp().execute("nbd-server-start", address).unwrap();
    vm.qmp().execute("block-export-add", json!({ "type": "nbd", "id": "out", "node-name": "disk" })).unwrap();
    assert!(only_failure(&source(&mut vm)).starts_with("node disk is exported (by out)"));
}

#[test]
fn a_device_that_qemu_cannot_save_is_named() {
    let node = "driver=null-co,node-name=null,size=1048576";
    let qemu = qemu_or_skip!("-M", "q35", "-blockdev", node, "-device", "nvme,serial=x,drive=null,id=disk0");
    let mut vm = qemu.connect();
    assert!(only_failure(&source(&mut vm)).contains("non-migratable device"));
}

#[test]
fn vhost_user_is_found_as_a_backend_and_as_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let backend = |name: &str| {
        let path = dir.path().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || answer_vhost_user(&listener));
        format!("socket,id={name},path={}", path.display())
    };
    let memory = "memory-backend-memfd,id=mem,size=128M,share=on";
    let qemu = qemu_or_skip!(
        "-M",
        "q35,memory-backend=mem",
        "-object",
        memory,
        "-chardev",
        backend("net"),
        "-netdev",
        "vhost-user,id=net0,chardev=net",
        "-device",
        "virtio-net-pci,netdev=net0,id=card",
        "-chardev",
        backend("fs"),
        "-device",
        "vhost-user-fs-pci,chardev=fs,tag=home,id=share",
    );
    let findings = source(&mut qemu.connect());
    let failed = failed(&findings);
    assert!(failed.iter().any(|text| text.starts_with("network backend net0 (vhost-user)")), "{failed:?}");
    assert!(
        failed.iter().any(|text| text.starts_with("device share (vhost-user-fs-pci): virtiofsd")),
        "{failed:?}"
    );
}

/// The least a vhost-user backend says: a virtio device of today, without protocol features. A message is u32 request, flags and size, then the payload.
fn answer_vhost_user(listener: &UnixListener) {
    let mut socket = listener.accept().unwrap().0;
    let mut header = [0; 12];
    while socket.read_exact(&mut header).is_ok() {
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let (request, flags, bytes) = (word(0), word(4), word(8));
        socket.read_exact(&mut vec![0; bytes as usize]).unwrap();
        // GET_FEATURES, GET_VRING_BASE, GET_PROTOCOL_FEATURES and GET_QUEUE_NUM want an answer, and so does
        // whatever has the flag for it.
        if ![1, 11, 15, 17].contains(&request) && flags & 8 == 0 {
            continue;
        }
        let value: u64 = if request == 1 { 1 << 30 | 1 << 32 } else { 0 };
        let header = [request, 5, 8].map(u32::to_le_bytes).concat();
        let answer = [&header[..], &value.to_le_bytes()].concat();
        if socket.write_all(&answer).is_err() {
            return;
        }
    }
}

#[test]
fn another_process_with_the_ram_mapped_is_named_with_its_pid() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("ram");
    let backend = format!("memory-backend-file,id=mem,size=16M,share=on,mem-path={}", path.display());
    let qemu = qemu_or_skip!("-M", "q35,memory-backend=mem", "-m", "16", "-object", backend.clone());
    let other =
        qemu_or_skip!("-M", "q35,memory-backend=mem", "-m", "16", "-object", backend, "-incoming", "defer");
    let wanted = format!("process {} (", other.pid());
    assert!(only_failure(&source(&mut qemu.connect())).starts_with(&wanted));
    // The target that shares the source's memory would overwrite it.
    let wanted = format!("process {} (", qemu.pid());
    assert!(only_failure(&target(&mut other.connect())).starts_with(&wanted));
}

#[test]
fn who_traces_qemu_already_is_named() {
    let qemu = qemu_or_skip!();
    let tracer = nix::unistd::gettid();
    nix::sys::ptrace::seize(nix::unistd::Pid::from_raw(qemu.pid()), nix::sys::ptrace::Options::empty())
        .unwrap();
    let findings = source(&mut qemu.connect());
    assert!(only_failure(&findings).contains(&format!("traced by process {tracer}")), "{findings:?}");

    let mut puppet = Puppet::start(&qemu.qmp(), 0);
    puppet.steps(&["connect", "guard"]);
    let refused = puppet.refused("borrow");
    assert!(refused.contains(&format!("is traced by process {tracer}")), "{refused}");
}

#[test]
fn a_migration_of_qemus_own_is_seen() {
    let source_qemu: Qemu = qemu_or_skip!();
    let mut vm = source_qemu.connect();
    // To a peer that takes nothing, at a byte a second.
    let path = source_qemu.dir().join("peer");
    let _listener = UnixListener::bind(&path).unwrap();
    vm.qmp().execute("migrate-set-parameters", json!({ "max-bandwidth": 1 })).unwrap();
    vm.qmp().execute("migrate", json!({ "uri": format!("unix:{}", path.display()) })).unwrap();
    let found = wait_for("the migration to be active", || {
        let findings = source(&mut vm);
        findings.into_iter().find(|finding| finding.text == "QEMU's own migration is active")
    });
    assert_eq!(found.verdict, Verdict::Fail);
}
