//! The guard: what it borrows, and what becomes of the VM when whimbrel is killed.

use crate::bed::{Puppet, Qemu, qemu_or_skip, ticks, wait_for, wait_for_ticks};
use ram::Region;
use std::io::Read;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};
use whimbrel_qemu::blocks;

/// The number of the last point in the injection; see `faults::point`.
const POINTS: u32 = 13;

#[test]
fn a_userfaultfd_is_borrowed_and_qemu_keeps_none() {
    let qemu = qemu_or_skip!("-m", "32");
    let mut puppet = Puppet::start(&qemu.qmp(), 0);
    puppet.steps(&["connect", "guard"]);
    let mut stood_still: Vec<Duration> =
        (0..20).map(|_| Duration::from_nanos(puppet.step("borrow").unwrap().parse().unwrap())).collect();
    assert_eq!(qemu.fd_count("anon_inode:[userfaultfd]"), 0);
    stood_still.sort();
    println!("the thread stood still for {:?}, at worst {:?}", stood_still[10], stood_still[19]);
    // The goal is 1 ms. A busy machine may take a thread away in the middle, but not most of the time.
    assert!(stood_still[5] < Duration::from_millis(1), "{stood_still:?}");
}

#[test]
fn a_sandboxed_qemu_can_be_borrowed_from_too() {
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let qemu = qemu_or_skip!("-sandbox", sandbox);
    let mut puppet = Puppet::start(&qemu.qmp(), 0);
    puppet.steps(&["connect", "guard", "borrow"]);
    drop(puppet);
    assert!(qemu.connect().run_state().unwrap().running);
}

#[test]
fn whimbrel_killed_at_any_point_of_the_injection_leaves_qemu_unharmed() {
    let qemu = qemu_or_skip!("-m", "32");
    let regions = blocks(&mut qemu.connect()).unwrap().1;
    for point in 1..=POINTS {
        let mut puppet = Puppet::start(&qemu.qmp(), point);
        puppet.steps(&["connect", "guard"]);
        let guard = puppet.guard();
        assert_eq!(puppet.step("borrow"), None, "point {point} was not reached");
        puppet.wait();
        wait_for("the guard to end", || guard.has_ended().then_some(()));
        assert!(qemu.connect().run_state().unwrap().running, "point {point}");
        wait_for_ticks(qemu.pid(), &regions);
        assert_eq!(qemu.fd_count("anon_inode:[userfaultfd]"), 0, "point {point}");
    }
}

#[test]
fn whimbrel_killed_with_the_vm_stopped_has_it_run_again_within_a_second() {
    let qemu = qemu_or_skip!("-m", "32");
    let regions = blocks(&mut qemu.connect()).unwrap().1;
    for last in ["lend", "save"] {
        let took = (0..3).map(|_| kill_while_stopped(&qemu, &regions, last)).min().unwrap();
        println!("killed after {last}, it ticked again after {took:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}

/// How long the VM stood still from the kill to its next tick.
fn kill_while_stopped(qemu: &Qemu, regions: &[Region], last: &str) -> Duration {
    let mut puppet = Puppet::start(&qemu.qmp(), 0);
    puppet.steps(&["connect", "guard", "arm", "stop", last]);
    let stopped_at = ticks(qemu.pid(), regions);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(ticks(qemu.pid(), regions), stopped_at, "the VM is stopped");
    let killed = Instant::now();
    puppet.kill();
    wait_for("the VM to run", || (ticks(qemu.pid(), regions) != stopped_at).then_some(()));
    let took = killed.elapsed();
    let mut vm = qemu.connect();
    assert_eq!(vm.qmp().execute("query-fdsets", serde_json::json!({})).unwrap(), serde_json::json!([]));
    took
}

#[test]
fn a_disarmed_guard_leaves_a_stopped_vm_alone() {
    let qemu = qemu_or_skip!("-m", "32");
    let mut puppet = Puppet::start(&qemu.qmp(), 0);
    puppet.steps(&["connect", "guard", "arm", "stop", "disarm"]);
    puppet.kill();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(qemu.connect().run_state().unwrap().name, "paused");
}

#[test]
fn a_commit_goes_out_whole_and_disarms() {
    let qemu = qemu_or_skip!("-m", "32");
    let path = qemu.dir().join("peer");
    let listener = UnixListener::bind(&path).unwrap();
    let mut puppet = Puppet::start(&qemu.qmp(), 0);
    puppet.steps(&["connect", "guard", "arm", "stop"]);
    puppet.steps(&[&format!("peer {}", path.display()), "commit it-is-yours"]);
    puppet.kill();
    let mut text = String::new();
    listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
    assert_eq!(text, "it-is-yours");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(qemu.connect().run_state().unwrap().name, "paused");
}

#[test]
fn a_commit_to_a_peer_that_is_gone_is_unsent_and_the_guard_stays_armed() {
    let qemu = qemu_or_skip!("-m", "32");
    let path = qemu.dir().join("peer");
    let listener = UnixListener::bind(&path).unwrap();
    let mut puppet = Puppet::start(&qemu.qmp(), 0);
    puppet.steps(&["connect", "guard", "arm", "stop", &format!("peer {}", path.display())]);
    drop(listener);
    assert!(puppet.refused("commit it-is-yours").starts_with("the commit was not sent"));
    puppet.kill();
    wait_for("the VM to run", || qemu.connect().run_state().unwrap().running.then_some(()));
}
