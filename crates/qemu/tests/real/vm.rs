//! What is asked of a running QEMU.

use crate::bed::{Puppet, qemu_or_skip, wait_for_ticks};
use std::time::Duration;
use whimbrel_qemu::{Accelerator, Vm};

const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn a_vm_tells_who_and_what_it_is() {
    let qemu = qemu_or_skip!("-M", "q35", "-smp", "3", "-cpu", "qemu64");
    let mut vm = qemu.connect();
    assert_eq!(vm.pid(), qemu.pid());
    assert!(vm.version().major >= 8, "{}", vm.version());
    let machine = vm.machine().unwrap();
    assert!(machine.name.starts_with("pc-q35-"), "{machine:?}");
    assert!(!machine.name.ends_with("-machine"));
    assert_eq!((machine.cpu.as_str(), machine.cpu_count), ("qemu64-x86_64-cpu", 3));
    assert_eq!(machine.page_bits, None);
    assert_eq!(vm.accelerator().unwrap(), Accelerator::Tcg);
    assert!(!vm.is_waiting().unwrap());
}

#[test]
fn a_vm_is_stopped_and_runs_on() {
    let qemu = qemu_or_skip!();
    let mut vm = qemu.connect();
    assert!(vm.run_state().unwrap().running);
    vm.stop(LIMIT).unwrap();
    assert_eq!(vm.run_state().unwrap().name, "paused");
    vm.cont().unwrap();
    assert!(vm.run_state().unwrap().running);
}

/// A disk that takes this long for a request, and one request to it.
const SLOW: Duration = Duration::from_secs(2);

fn keep_disk_busy(vm: &mut Vm) {
    let sent =
        vm.qmp().human("qemu-io -d /machine/peripheral/disk/virtio-backend \"aio_read 0 512\"").unwrap();
    assert!(!sent.contains("rror"), "{sent}");
}

#[test]
fn a_stop_that_waits_for_a_slow_disk_is_given_up_in_time_and_taken_back() {
    let node = format!("driver=null-aio,node-name=slow,size=1048576,latency-ns={}", SLOW.as_nanos());
    let qemu = qemu_or_skip!("-blockdev", node, "-device", "virtio-blk-pci,drive=slow,id=disk");
    let mut vm = qemu.connect();
    keep_disk_busy(&mut vm);
    let late = vm.stop(Duration::from_millis(200)).unwrap_err();
    assert!(late.to_string().contains("did not answer stop in 200ms"), "{late}");
    vm.cont().unwrap();
    assert!(vm.run_state().unwrap().running);
}

#[test]
fn whimbrel_killed_while_a_stop_waits_for_a_slow_disk_has_the_vm_run_again() {
    let node = format!("driver=null-aio,node-name=slow,size=1048576,latency-ns={}", SLOW.as_nanos());
    let qemu = qemu_or_skip!("-blockdev", node, "-device", "virtio-blk-pci,drive=slow,id=disk");
    let (_, regions) = whimbrel_qemu::blocks(&mut qemu.connect()).unwrap();
    keep_disk_busy(&mut qemu.connect());
    let mut puppet = Puppet::start(&qemu.qmp(), 0);
    puppet.steps(&["connect", "guard", "arm"]);
    puppet.begin("stop");
    std::thread::sleep(Duration::from_millis(300));
    puppet.kill();
    std::thread::sleep(SLOW);
    wait_for_ticks(qemu.pid(), &regions);
    assert!(qemu.connect().run_state().unwrap().running);
}

#[test]
fn cont_before_anything_came_in_is_an_error() {
    let qemu = qemu_or_skip!("-incoming", "defer");
    let mut vm = qemu.connect();
    assert!(vm.is_waiting().unwrap());
    assert!(vm.cont().unwrap_err().to_string().contains("inmigrate"));
}

#[test]
fn quit_ends_the_process_and_the_vm_knows() {
    let qemu = qemu_or_skip!("-S");
    let mut vm: Vm = qemu.connect();
    assert!(!vm.has_ended());
    vm.quit().unwrap();
    crate::bed::wait_for("QEMU to end", || vm.has_ended().then_some(()));
}

#[test]
fn nodes_with_direct_io_are_named_and_others_not() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let image = dir.path().join("disk");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let node = |name: &str, direct: &str| {
        let path = image.display();
        format!("driver=file,node-name={name},filename={path},cache.direct={direct},locking=off")
    };
    let qemu = qemu_or_skip!("-S", "-blockdev", node("slow", "off"), "-blockdev", node("fast", "on"));
    assert_eq!(qemu.connect().direct_io_nodes().unwrap(), ["fast"]);
}
