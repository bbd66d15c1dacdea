//! Two QEMUs on this host with whimbrel between them, used as anybody would: by its own commands.

use super::child::Child;
use super::serial::{Beat, Serial};
use super::{CHECKING, GuestWord, Interrupt, LAP_SECONDS, PATIENCE, Shown, working_bytes};
use crate::args::{Accel, Demo};
use crate::{Exit, Stop, report};
use clap::ValueEnum;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;
use tempfile::TempDir;

/// Why nothing was shown.
pub enum Missed {
    /// There is no QEMU that can be migrated from outside here.
    NoQemu(String),
    /// It failed, or the operator had enough.
    Stop(Stop),
}

impl From<Stop> for Missed {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// Starts both QEMUs, moves the guest, and hears what it says at the target. All is gone when this returns.
pub fn show(args: &Demo, interrupt: &Interrupt) -> Result<Shown, Missed> {
    let bench = Bench::new(args, interrupt)?;
    let (mut source, accel) = bench.start_source()?;
    let pages = bench.wait_for_lap(&mut source)?;
    let mut target = bench.start_qemu("target", accel, &["-incoming", "defer"])?;
    let (_receive, address) = bench.receive(&mut target)?;
    let (ended, stdout) = bench.migrate(&address)?;
    if !ended.is_some_and(|status| status.success()) {
        return Err(missed(ended, "the migration failed, as told above"));
    }
    let (table, last_line) = stdout.trim_end().rsplit_once('\n').unwrap_or(("", &stdout));
    let migration = serde_json::from_str(last_line)
        .map_err(|error| Stop::failed(format!("whimbrel migrate ended with no JSON: {error}")))?;
    eprintln!("{CHECKING}");
    let guest = bench.hear_guest(pages)?;
    Ok(Shown { table: table.into(), migration, vmm: "qemu", accel: name(accel), guest })
}

/// A whimbrel that ended in failure. One that refused has said what is missing here.
fn missed(ended: Option<ExitStatus>, failure: &str) -> Missed {
    match ended.and_then(|status| status.code()) {
        Some(code) if code == Exit::Refused as i32 => Missed::NoQemu(failure.into()),
        _ => Stop::failed(failure).into(),
    }
}

/// What both ends have in common.
struct Bench<'a> {
    args: &'a Demo,
    interrupt: &'a Interrupt,
    qemu: OsString,
    guest: &'a Path,
    /// Goes with all that is in it.
    directory: TempDir,
}

impl<'a> Bench<'a> {
    fn new(args: &'a Demo, interrupt: &'a Interrupt) -> Result<Self, Missed> {
        let qemu = std::env::var_os("WHIMBREL_QEMU").unwrap_or_else(|| "qemu-system-x86_64".into());
        let version = qemu_version(&qemu).map_err(Missed::NoQemu)?;
        let Some(guest) = &args.guest else {
            let reason = "--guest names no guest for it to run (`make demo` builds one and gives it)";
            return Err(Missed::NoQemu(reason.into()));
        };
        if !guest.is_file() {
            return Err(Stop::usage(format!("--guest: there is no file {}", guest.display()))
                .next("tests/guests/multiboot/build.sh prints where it is")
                .into());
        }
        let directory = tempfile::Builder::new().prefix("whimbrel-demo-").tempdir();
        let directory =
            directory.map_err(|error| Stop::failed(format!("cannot make a temporary directory: {error}")))?;
        eprintln!("demo: QEMU {version}, a guest with {} of RAM", report::bytes(args.size));
        Ok(Self { args, interrupt, qemu, guest, directory })
    }

    /// The source, with who runs its instructions.
    fn start_source(&self) -> Result<(Child, Accel), Stop> {
        if self.args.accel == Accel::Tcg || (self.args.accel == Accel::Auto && !has_kvm()) {
            return Ok((self.start_qemu("source", Accel::Tcg, &[])?, Accel::Tcg));
        }
        let mut source = self.start_qemu("source", Accel::Kvm, &[])?;
        if self.args.accel == Accel::Kvm {
            return Ok((source, Accel::Kvm));
        }
        let booted = self.interrupt.wait(KVM_BOOT_MAX, || {
            let beats = self.serial("source").last().is_some();
            (beats || source.ended().is_some()).then_some(beats)
        })?;
        if booted == Some(true) {
            return Ok((source, Accel::Kvm));
        }
        eprintln!("demo: KVM did not boot the guest within {} s, so without it", KVM_BOOT_MAX.as_secs());
        drop(source);
        let _ = std::fs::remove_file(self.path("source.serial"));
        Ok((self.start_qemu("source", Accel::Tcg, &[])?, Accel::Tcg))
    }

    fn start_qemu(&self, end: &str, accel: Accel, more: &[&str]) -> Result<Child, Stop> {
        let pages = working_bytes(self.args.size) / ram::PAGE as u64;
        // Half of the working set is written in each lap: data becomes zeros, zeros become data.
        let workload = format!("pages={pages} dirty={} rate={} zero=1", pages / 2, pages / LAP_SECONDS);
        let path = |what: &str| self.path(&format!("{end}.{what}")).display().to_string();
        let mut command = Command::new(&self.qemu);
        command.args(["-nodefaults", "-display", "none", "-no-reboot", "-machine", "q35"]);
        command.args(["-accel", name(accel), "-m", &format!("{}M", self.args.size >> 20)]);
        command.arg("-kernel").arg(self.guest).args(["-append", &workload]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", path("qmp"))]);
        command.args(["-serial", &format!("file:{}", path("serial"))]).args(more);
        if let (Accel::Kvm, Some(firmware)) = (accel, &self.args.firmware) {
            command.arg("-bios").arg(firmware);
        }
        Child::start(end, &mut command, self.directory.path())
    }

    /// Waits until the guest has checked every page once. Gives how many there are.
    fn wait_for_lap(&self, source: &mut Child) -> Result<u64, Stop> {
        let lap = self.interrupt.wait(PATIENCE, || {
            let serial = self.serial("source");
            let done = serial.last().filter(|beat| beat.lap > 0 || beat.lost > 0).zip(serial.pages());
            (done.is_some() || source.ended().is_some()).then_some((serial, done))
        })?;
        let Some((serial, Some((beat, pages)))) = lap else {
            let said = source.stderr();
            return Err(Stop::failed(format!("the guest does not run at the source\n{}", said.trim_end())));
        };
        if beat.lost > 0 {
            let text =
                format!("the guest lost {} pages before it was moved: this host is at fault", beat.lost);
            return Err(Stop::failed(text));
        }
        let writes = rate(&serial) * ram::PAGE as u64;
        eprintln!("demo: source: the guest is up and writes {}/s", report::bytes(writes));
        Ok(pages)
    }

    /// `whimbrel receive` at the target, and where it listens.
    fn receive(&self, target: &mut Child) -> Result<(Child, String), Missed> {
        let qmp = self.path("target.qmp");
        let opened = || (qmp.exists() || target.ended().is_some()).then_some(());
        self.interrupt.wait(PATIENCE, opened)?;
        if target.ended().is_some() {
            return Err(
                Stop::failed(format!("the target's QEMU ended\n{}", target.stderr().trim_end())).into()
            );
        }
        let mut command = self.whimbrel(&["receive", "tcp:127.0.0.1:0", "--qmp"])?;
        let mut receive = Child::start("receive", command.arg(qmp), self.directory.path())?;
        let address = self.interrupt.wait(PATIENCE, || {
            let said = receive.stderr();
            let address = said.lines().find_map(|line| line.strip_prefix("listening on ").map(str::to_owned));
            (address.is_some() || receive.ended().is_some()).then_some(address)
        })?;
        match address.flatten() {
            Some(address) => {
                eprintln!("demo: target: waits with `whimbrel receive` on {address}");
                Ok((receive, address))
            }
            None => {
                let said = receive.stderr();
                Err(missed(receive.ended(), &format!("the target does not listen\n{}", said.trim_end())))
            }
        }
    }

    /// Runs `whimbrel migrate` with its own display. Gives how it ended and what it printed.
    fn migrate(&self, address: &str) -> Result<(Option<ExitStatus>, String), Stop> {
        let channels = self.args.channels.to_string();
        let progress = self.args.output.progress.to_possible_value().expect("no way to show it is hidden");
        let mut command = self.whimbrel(&["migrate", address, "--json", "--channels", &channels])?;
        command.args(["--progress", progress.get_name(), "--qmp"]).arg(self.path("source.qmp"));
        if let Some(rate) = self.args.bandwidth {
            command.args(["--bandwidth", &format!("{rate}B")]);
        }
        let mut migrate = Child::start_loud("migrate", &mut command, self.directory.path())?;
        let ended = self.interrupt.wait(MIGRATION_MAX, || migrate.ended());
        let ended = ended.inspect_err(|_| {
            migrate.interrupt();
            let calm = Interrupt(Default::default());
            let _ = calm.wait(PATIENCE, || migrate.ended());
        })?;
        Ok((ended, migrate.stdout()))
    }

    /// Waits until the guest has checked every page again at the target.
    fn hear_guest(&self, pages: u64) -> Result<Result<GuestWord, String>, Stop> {
        let before = self.serial("source").last();
        let heard = self.interrupt.wait(PATIENCE, || {
            let serial = self.serial("target");
            let (first, last) = (serial.beats().next()?, serial.last()?);
            let done = last.lost > 0 || last.visits >= first.visits + pages;
            (done || serial.pages().is_some()).then_some((serial, first, last))
        })?;
        Ok(match (before, heard) {
            (Some(before), Some((serial, first, last))) => verdict(before, &serial, first, last),
            _ => Err("it does not come round at the target".into()),
        })
    }

    /// A command of this very program.
    fn whimbrel(&self, words: &[&str]) -> Result<Command, Stop> {
        let program = std::env::current_exe()
            .map_err(|error| Stop::failed(format!("cannot find this program again: {error}")))?;
        let mut command = Command::new(program);
        command.args(words).env("WHIMBREL_RUNTIME_DIR", self.directory.path());
        Ok(command)
    }

    fn serial(&self, end: &str) -> Serial {
        Serial::read(&self.path(&format!("{end}.serial")))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

fn verdict(before: Beat, serial: &Serial, first: Beat, last: Beat) -> Result<GuestWord, String> {
    if serial.pages().is_some() {
        return Err("it booted again at the target".into());
    }
    if first.number <= before.number || first.visits < before.visits || first.writes < before.writes {
        return Err(format!("it went back in time: heartbeat {before:?} there, then {first:?} here"));
    }
    Ok(GuestWord { visits: last.visits, visits_here: last.visits - first.visits, lost: last.lost })
}

/// Pages that the guest writes in a second, lately.
fn rate(serial: &Serial) -> u64 {
    let beats: Vec<Beat> = serial.beats().collect();
    let lately = &beats[beats.len().saturating_sub(BEATS_PER_SECOND + 1)..];
    match lately {
        [first, .., last] => {
            (last.writes - first.writes) * BEATS_PER_SECOND as u64 / (last.number - first.number).max(1)
        }
        _ => 0,
    }
}

fn qemu_version(qemu: &OsString) -> Result<String, String> {
    let shown = qemu.display();
    let output = Command::new(qemu).arg("--version").output().map_err(|error| format!("{shown}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split("version ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let version = version.ok_or_else(|| format!("{shown} --version says {text:?}"))?;
    match version.split('.').next().and_then(|major| major.parse::<u32>().ok()) {
        Some(major) if major >= 8 => Ok(version.to_owned()),
        _ => Err(format!("{shown} is version {version}, and 8.0 is the first that says where guest RAM is")),
    }
}

fn has_kvm() -> bool {
    OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
}

fn name(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "kvm",
        Accel::Auto | Accel::Tcg => "tcg",
    }
}

/// A guest boots within a second where KVM is real, and takes minutes where firmware is emulated.
const KVM_BOOT_MAX: Duration = Duration::from_secs(8);

/// Far more than any size takes that fits this host twice.
const MIGRATION_MAX: Duration = Duration::from_secs(3600);

const BEATS_PER_SECOND: usize = 10;
