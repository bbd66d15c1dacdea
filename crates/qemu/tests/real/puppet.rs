//! A program for tests that does to a QEMU what whimbrel does, one step for each line it reads, until it is killed.
//! Each step is answered by one line: `ok` with what it found, or `failed` with why.

use std::error::Error;
use std::io::{BufRead, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use whimbrel_qemu::{Guard, Vm, device, guard};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let first = arguments.next().expect("the path of a QMP socket");
    if first == guard::ARGUMENT {
        return guard::main();
    }
    let mut puppet = Puppet { qmp: first.into(), vm: None, guard: None, userfaultfd: None, peer: None };
    for line in std::io::stdin().lock().lines() {
        let answer = match puppet.step(&line.expect("steps are text")) {
            Ok(found) => format!("ok {found}"),
            Err(error) => format!("failed {error}"),
        };
        println!("{answer}");
        std::io::stdout().flush().expect("the test listens");
    }
    ExitCode::SUCCESS
}

struct Puppet {
    qmp: PathBuf,
    vm: Option<Vm>,
    guard: Option<Guard>,
    userfaultfd: Option<OwnedFd>,
    peer: Option<UnixStream>,
}

impl Puppet {
    fn step(&mut self, line: &str) -> Result<String, Box<dyn Error>> {
        let (step, word) = line.split_once(' ').unwrap_or((line, ""));
        if step == "connect" {
            self.vm = Some(Vm::connect(&self.qmp)?);
            return Ok(String::new());
        }
        let vm = self.vm.as_mut().ok_or("not connected")?;
        if step == "guard" {
            self.guard = Some(Guard::start(vm)?);
            return Ok(String::new());
        }
        let guard = self.guard.as_mut().ok_or("no guard")?;
        match step {
            "borrow" => {
                let (userfaultfd, stood_still) = guard.borrow_userfaultfd()?;
                self.userfaultfd = Some(userfaultfd);
                return Ok(stood_still.as_nanos().to_string());
            }
            "arm" => guard.arm()?,
            "disarm" => guard.disarm()?,
            "stop" => return Ok(vm.stop(Duration::from_secs(5))?.as_nanos().to_string()),
            "save" => return Ok(device::save(vm)?.len().to_string()),
            "lend" => {
                let spare = std::io::stderr().as_fd().try_clone_to_owned()?;
                let arguments = serde_json::json!({ "opaque": "whimbrel" });
                vm.qmp().execute_with_fd("add-fd", arguments, spare.as_fd())?;
            }
            "peer" => self.peer = Some(UnixStream::connect(word)?),
            "commit" => guard.commit(self.peer.as_ref().ok_or("no peer")?.as_fd(), word.as_bytes())?,
            other => return Err(format!("no step {other}").into()),
        }
        Ok(String::new())
    }
}
