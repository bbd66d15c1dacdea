//! The tests of the tests: the guests run on every kind of memory, and see it when their memory is spoiled.
//! Nothing here needs whimbrel.

use harness::{Accel, Backend, DEADLINE, Disk, Guest, Vm, VmSpec, or_skip, wait_until};

/// Small and slow enough to leave the machine to others; one lap takes 0.1 s.
const WORKLOAD: &str = "pages=2048 rate=20000";

#[test]
fn the_bare_metal_guest_runs_on_every_kind_of_memory_under_tcg() {
    for backend in Backend::ALL {
        or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).backend(backend).boot()).wait_ok();
    }
}

#[test]
fn the_bare_metal_guest_runs_on_every_kind_of_memory_under_kvm() {
    for backend in Backend::ALL {
        or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).backend(backend).accel(Accel::Kvm).boot()).wait_ok();
    }
}

#[test]
fn the_bare_metal_guest_reaches_memory_above_4_gib() {
    let vm = or_skip!(VmSpec::new(Guest::multiboot("fill=zero pages=1024")).ram_mib(3072).boot());
    let filled = vm.wait_line("filled");
    let pages: u64 = number(&filled, "pages=");
    assert!(pages > 3000 << 20 >> 12, "only {pages} pages of 3 GiB");
    vm.wait_ok();
}

#[test]
fn an_idle_guest_without_filling_leaves_its_memory_untouched() {
    let vm = or_skip!(VmSpec::new(Guest::multiboot("mode=idle")).ram_mib(1024).boot());
    vm.wait_ok();
    let resident = vm.resident_bytes();
    assert!(resident < 256 << 20, "{resident} bytes resident of a guest that touches nothing");
}

#[test]
fn a_page_that_went_back_in_time_is_seen() {
    let vm = boot("pages=256 rate=5000");
    let mut old = [0; 4096];
    vm.pause();
    vm.read_guest(page(&vm, 7), &mut old);
    vm.resume();
    vm.wait_beats(3);
    vm.write_guest(page(&vm, 7), &old);
    let line = vm.wait_line("LOST page=7 ");
    assert!(line.ends_with("kind=stale"), "{line}");
    assert_eq!(number(&line, "got="), u64::from_le_bytes(old[16..24].try_into().expect("eight bytes")));
}

#[test]
fn a_single_spoiled_byte_is_seen() {
    let vm = boot("pages=256 dirty=0");
    vm.write_guest(page(&vm, 100) + 4095, &[0x55]);
    assert!(vm.wait_line("LOST page=100 ").ends_with("kind=torn"));
}

#[test]
fn a_page_torn_between_two_generations_is_seen() {
    let vm = boot("pages=256 rate=5000");
    let mut old_half = [0; 2048];
    vm.pause();
    vm.read_guest(page(&vm, 31) + 2048, &mut old_half);
    vm.resume();
    vm.wait_beats(3);
    vm.write_guest(page(&vm, 31) + 2048, &old_half);
    assert!(vm.wait_line("LOST page=31 ").ends_with("kind=torn"));
}

#[test]
fn a_page_at_the_wrong_place_is_seen() {
    let vm = boot("pages=256 dirty=0");
    let mut other = [0; 4096];
    vm.read_guest(page(&vm, 9), &mut other);
    vm.write_guest(page(&vm, 10), &other);
    assert!(vm.wait_line("LOST page=10 ").ends_with("kind=misplaced"));
}

#[test]
fn data_where_a_page_should_have_become_zero_is_seen_and_the_other_way_round() {
    let vm = boot("pages=256 zero=1 rate=2000");
    let data = read_when(&vm, page(&vm, 5), |word| word != 0);
    vm.resume();
    read_when(&vm, page(&vm, 5), |word| word == 0);
    vm.write_guest(page(&vm, 5), &data);
    vm.resume();
    assert!(vm.wait_line("LOST page=5 ").ends_with("kind=stale"));

    let vm = boot("pages=256 dirty=0");
    vm.write_guest(page(&vm, 5), &[0; 4096]);
    assert!(vm.wait_line("LOST page=5 ").ends_with("kind=zero"));
}

#[test]
fn a_spoiled_table_of_generations_is_seen() {
    let vm = boot("pages=256 dirty=0");
    let table = page(&vm, 0) - 4096;
    vm.write_guest(table + 4 * 77, &[9]);
    vm.wait_line("kind=table");
}

#[test]
fn a_disk_on_a_slowed_device_is_readable() {
    let disk = or_skip!(Disk::stamped(4)).slow_device(1 << 20);
    or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).disk(disk).boot()).wait_ok();
}

#[test]
fn a_fresh_qemu_bears_no_traces() {
    let vm = or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).backend(Backend::Memfd).boot());
    assert_eq!(vm.traces(), Vec::<String>::new());
}

#[test]
fn a_target_waits_for_its_guest() {
    let vm = or_skip!(VmSpec::new(Guest::multiboot(WORKLOAD)).await_incoming());
    assert_eq!(vm.state(), "inmigrate");
    assert!(vm.transcript().lines().next().is_none());
}

#[track_caller]
fn boot(options: &str) -> Vm {
    let vm = VmSpec::new(Guest::multiboot(options)).boot().unwrap_or_else(|error| panic!("{error}"));
    vm.wait_ok();
    vm
}

/// Pauses the guest at a moment when the first word of a page is as wanted; gives the page.
#[track_caller]
fn read_when(vm: &Vm, gpa: u64, wanted: impl Fn(u64) -> bool) -> [u8; 4096] {
    let found = wait_until(DEADLINE, || {
        vm.pause();
        let mut bytes = [0; 4096];
        vm.read_guest(gpa, &mut bytes);
        let is_wanted = wanted(u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")));
        if !is_wanted {
            vm.resume();
        }
        is_wanted.then_some(bytes)
    });
    found.expect("a page flips within a lap")
}

/// The guest-physical address of a page of the working set.
#[track_caller]
fn page(vm: &Vm, number: u64) -> u64 {
    let ready = vm.wait_line("ready ");
    let (_, base) = ready.split_once("base=").expect("the guest says where its working set lies");
    u64::from_str_radix(base, 16).expect("in hexadecimal") + number * 4096
}

#[track_caller]
fn number(line: &str, name: &str) -> u64 {
    let (_, rest) = line.split_once(name).unwrap_or_else(|| panic!("no {name} in {line:?}"));
    let digits = rest.split(' ').next().unwrap_or_default();
    digits.parse().unwrap_or_else(|error| panic!("{name}{digits}: {error}"))
}
