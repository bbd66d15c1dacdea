//! Guest RAM as seen from outside, to spoil it on purpose; and what a migration may leave behind in a QEMU.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use serde_json::json;

use crate::Vm;

impl Vm {
    /// Reads guest memory; the range must not leave its RAM block. Panics if it is not RAM.
    #[track_caller]
    pub fn read_guest(&self, gpa: u64, bytes: &mut [u8]) {
        self.memory().read_exact_at(bytes, self.host_address(gpa)).expect("guest RAM is mapped in QEMU");
    }

    /// Writes guest memory behind the guest's back.
    #[track_caller]
    pub fn write_guest(&self, gpa: u64, bytes: &[u8]) {
        self.memory().write_all_at(bytes, self.host_address(gpa)).expect("guest RAM is mapped in QEMU");
    }

    #[track_caller]
    fn host_address(&self, gpa: u64) -> u64 {
        let answer = self.hmp(&format!("gpa2hva {gpa:#x}"));
        let address = answer.trim().rsplit_once("is 0x").map(|(_, digits)| u64::from_str_radix(digits, 16));
        address.and_then(Result::ok).unwrap_or_else(|| panic!("no RAM at {gpa:#x}: {answer}"))
    }

    fn memory(&self) -> fs::File {
        let path = format!("/proc/{}/mem", self.pid());
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Resident memory of QEMU, in bytes: tells whether untouched guest memory was touched.
    pub fn resident_bytes(&self) -> u64 {
        let status = self.proc_file("status");
        let kib = status
            .lines()
            .filter_map(|line| line.strip_prefix("Rss"))
            .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        kib.sum::<u64>() << 10
    }

    /// What a tool that has gone may have left in this QEMU: a userfaultfd, memory registered with one, a
    /// tracer, a set of passed descriptors. Empty is what must be.
    pub fn traces(&self) -> Vec<String> {
        let mut traces = Vec::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", self.pid())).into_iter().flatten().flatten() {
            let target = fs::read_link(entry.path()).unwrap_or_default();
            if target.to_string_lossy().contains("userfaultfd") {
                traces.push(format!("descriptor {}: {}", entry.file_name().display(), target.display()));
            }
        }
        let smaps = self.proc_file("smaps");
        let registered = |flags: &&str| flags.split(' ').any(|flag| ["um", "uw", "ui"].contains(&flag));
        let count = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:")).filter(registered).count();
        if count > 0 {
            traces.push(format!("{count} mappings registered with a userfaultfd"));
        }
        if let Some(tracer) = self.proc_file("status").lines().find(|line| line.starts_with("TracerPid:"))
            && !tracer.ends_with("\t0")
        {
            traces.push(tracer.to_owned());
        }
        let sets = self.execute("query-fdsets", json!({}));
        if sets != json!([]) {
            traces.push(format!("descriptor sets {sets}"));
        }
        traces
    }

    fn proc_file(&self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.pid())).unwrap_or_default()
    }
}
