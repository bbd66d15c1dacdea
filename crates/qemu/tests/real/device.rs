//! Device state of a real QEMU, loaded into a second one.

use crate::bed::{Qemu, qemu_or_skip, read, ticks, wait_for_ticks, write};
use ram::{Layout, PAGE, Region};
use serde_json::json;
use std::time::{Duration, Instant};
use whimbrel_qemu::device::{DeviceError, compose, load, save};
use whimbrel_qemu::{Vm, blocks};

const LIMIT: Duration = Duration::from_secs(5);

const MACHINE: [&str; 8] = ["-M", "q35", "-m", "32", "-vga", "std", "-device", "virtio-rng-pci"];

/// Copies all RAM of a stopped VM into one that waits.
fn copy_ram(source: (&Vm, &Layout, &[Region]), target: (&Vm, &Layout, &[Region])) {
    target.1.in_words_of(source.1).unwrap();
    let mut bytes = vec![0; 1 << 20];
    for region in source.2 {
        let name = &source.1.block(region.block).name;
        let id = target.1.find(name).unwrap();
        let there = target.2.iter().find(|there| there.block == id).unwrap();
        let total = region.pages * PAGE as u64;
        for at in (0..total).step_by(bytes.len()) {
            let chunk = &mut bytes[..(total - at).min(1 << 20) as usize];
            read(source.0.pid(), region.host + at, chunk);
            write(target.0.pid(), there.host + region.first_page * PAGE as u64 + at, chunk);
        }
    }
}

fn start_pair(options: &[&str], target_options: &[&str]) -> Option<(Qemu, Qemu)> {
    let source = [&MACHINE[..], options].concat();
    let target = [&source[..], &["-incoming", "defer"], target_options].concat();
    Some((Qemu::start(&source)?, Qemu::start(&target)?))
}

#[test]
fn a_guest_runs_on_in_a_second_qemu() {
    hand_over(&[]);
}

#[test]
fn a_guest_runs_on_in_a_second_qemu_under_kvm() {
    if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return println!("SKIPPED {}: no /dev/kvm", module_path!());
    }
    hand_over(&["-accel", "kvm"]);
}

fn hand_over(options: &[&str]) {
    for target_options in [&[][..], &["-S"]] {
        let Some((source_qemu, target_qemu)) = start_pair(options, target_options) else {
            return println!("SKIPPED {}: no QEMU", module_path!());
        };
        let (mut source, mut target) = (source_qemu.connect(), target_qemu.connect());
        let (layout, regions) = blocks(&mut source).unwrap();
        let (target_layout, target_regions) = blocks(&mut target).unwrap();
        wait_for_ticks(source.pid(), &regions);

        source.stop(LIMIT).unwrap();
        let stopped_at = ticks(source.pid(), &regions);
        let start = Instant::now();
        let saved = save(&mut source).unwrap();
        println!("{} bytes of device state in {:?}", saved.len(), start.elapsed());
        assert_eq!(source.qmp().execute("query-fdsets", json!({})).unwrap(), json!([]));
        copy_ram((&source, &layout, &regions), (&target, &target_layout, &target_regions));
        let machine = source.machine().unwrap();
        let stream = compose(&saved, &machine.name, machine.page_bits).unwrap();
        let start = Instant::now();
        load(&mut target, &stream).unwrap();
        println!("loaded in {:?}", start.elapsed());

        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(ticks(target.pid(), &target_regions), stopped_at, "no instruction before cont");
        source.quit().unwrap();
        target.cont().unwrap();
        wait_for_ticks(target.pid(), &target_regions);
        let now = ticks(target.pid(), &target_regions);
        assert!((stopped_at + 1..stopped_at + 200).contains(&now), "{stopped_at} went on as {now}");
    }
}

#[test]
fn a_source_that_saved_runs_on_as_if_nothing_had_happened() {
    let qemu = qemu_or_skip!("-M", "q35", "-m", "32");
    let mut vm = qemu.connect();
    let (_, regions) = blocks(&mut vm).unwrap();
    assert!(matches!(save(&mut vm), Err(DeviceError::Running)));
    vm.stop(LIMIT).unwrap();
    save(&mut vm).unwrap();
    vm.cont().unwrap();
    wait_for_ticks(vm.pid(), &regions);
}

#[test]
fn a_state_of_another_machine_is_refused_and_the_source_runs_on() {
    let Some((source_qemu, target_qemu)) = start_pair(&[], &[]) else {
        return println!("SKIPPED {}: no QEMU", module_path!());
    };
    let (mut source, mut target) = (source_qemu.connect(), target_qemu.connect());
    source.stop(LIMIT).unwrap();
    let stream = compose(&save(&mut source).unwrap(), "pc-i440fx-8.0", None).unwrap();
    let error = load(&mut target, &stream).unwrap_err();
    assert!(matches!(error, DeviceError::Load { .. } | DeviceError::Ended), "{error}");
    source.cont().unwrap();
    assert!(source.run_state().unwrap().running);
}

#[test]
fn a_stream_that_breaks_off_is_an_error_not_a_hang() {
    let Some((source_qemu, target_qemu)) = start_pair(&[], &[]) else {
        return println!("SKIPPED {}: no QEMU", module_path!());
    };
    let (mut source, mut target) = (source_qemu.connect(), target_qemu.connect());
    source.stop(LIMIT).unwrap();
    let machine = source.machine().unwrap();
    let stream = compose(&save(&mut source).unwrap(), &machine.name, None).unwrap();
    let start = Instant::now();
    let error = load(&mut target, &stream[..stream.len() / 2]).unwrap_err();
    assert!(matches!(error, DeviceError::Load { .. } | DeviceError::Ended), "{error}");
    assert!(start.elapsed() < LIMIT);
}

#[test]
fn a_qemu_that_does_not_wait_is_left_alone() {
    let qemu = qemu_or_skip!();
    let mut vm = qemu.connect();
    let refused = load(&mut vm, b"").unwrap_err();
    assert!(matches!(refused, DeviceError::NotWaiting { .. }), "{refused}");
    assert!(vm.run_state().unwrap().running);
}
