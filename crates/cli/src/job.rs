//! A running migration's own socket, and the commands that speak to it: one JSON line asks, one answers.

use crate::args;
use crate::{Exit, Stop, report, runtime};
use migrate::{Inbox, Note, Status};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The socket of this process's migration; gone when dropped.
pub struct Job {
    path: PathBuf,
}

impl Job {
    /// Serves `status` and `cancel` for the migration of the QEMU at `qmp`.
    pub fn serve(qmp: &Path, inbox: &Arc<Inbox<Note>>, status: &Arc<Mutex<Status>>) -> Result<Self, Stop> {
        let path = runtime::directory()?.join(format!("job-{}.sock", std::process::id()));
        let failed = |error| Stop::failed(format!("cannot serve {}: {error}", path.display()));
        let _ = fs::remove_file(&path); // Of an earlier process with our pid.
        let listener = UnixListener::bind(&path).map_err(failed)?;
        let qmp = fs::canonicalize(qmp).map_err(failed)?;
        let server = Server { qmp, inbox: inbox.clone(), status: status.clone() };
        let serve = move || listener.incoming().flatten().for_each(|stream| drop(server.answer(stream)));
        std::thread::Builder::new().name("job".into()).spawn(serve).map_err(failed)?;
        Ok(Self { path })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

struct Server {
    qmp: PathBuf,
    inbox: Arc<Inbox<Note>>,
    status: Arc<Mutex<Status>>,
}

impl Server {
    fn answer(&self, stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        let question = read_line(&stream)?;
        let status = self.status.lock().expect("no holder panics").clone();
        let answer = match question["command"].as_str() {
            Some("status") => json!({ "pid": std::process::id(), "qmp": self.qmp, "migration": status }),
            Some("cancel") => {
                self.inbox.put(Note::Cancel);
                json!({ "pid": std::process::id(), "qmp": self.qmp })
            }
            other => json!({ "error": format!("no command {other:?}; there are status and cancel") }),
        };
        writeln!(&stream, "{answer}")
    }
}

/// `whimbrel status`.
pub fn show(args: &args::Job) -> Result<Exit, Stop> {
    let jobs = jobs(args.qmp.as_deref(), "status")?;
    for job in &jobs {
        match args.json {
            true => println!("{job}"),
            false => println!("{}", report::status_line(job)),
        }
    }
    Ok(Exit::Done)
}

/// `whimbrel cancel`.
pub fn cancel(args: &args::Job) -> Result<Exit, Stop> {
    let running = jobs(args.qmp.as_deref(), "status")?;
    let [job] = running.as_slice() else {
        return Err(Stop::usage(format!("{} migrations run here; say which", running.len()))
            .next("whimbrel status, then whimbrel cancel --qmp SOCK"));
    };
    let path = runtime::directory()?.join(format!("job-{}.sock", job["pid"]));
    ask(&path, "cancel").map_err(|error| Stop::failed(format!("the migration does not answer: {error}")))?;
    match wait_for_end(&path) {
        true => {
            println!("{}", if args.json { r#"{"cancelled":true}"# } else { "ended; see its own last words" })
        }
        false => {
            return Err(Stop::failed(
                "asked it to end, but it still runs; past commit it can't be cancelled",
            ));
        }
    }
    Ok(Exit::Done)
}

fn wait_for_end(path: &Path) -> bool {
    (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        !path.exists()
    })
}

/// The status of every running migration, or of the one of this QEMU.
fn jobs(qmp: Option<&Path>, command: &str) -> Result<Vec<Value>, Stop> {
    let wanted = qmp.map(|path| fs::canonicalize(path).unwrap_or_else(|_| path.into()));
    let entries = fs::read_dir(runtime::directory()?).map_err(|error| Stop::failed(error.to_string()))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let sockets = paths.filter(|path| path.extension().is_some_and(|end| end == "sock"));
    let answers = sockets.filter_map(|path| match ask(&path, command) {
        Ok(answer) => Some(answer),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let _ = fs::remove_file(path); // Its process was killed.
            None
        }
        Err(_) => None,
    });
    let is_wanted = |job: &Value| wanted.as_ref().is_none_or(|path| job["qmp"].as_str() == path.to_str());
    let found: Vec<Value> = answers.filter(is_wanted).collect();
    match found.is_empty() {
        true => Err(Stop::failed("no migration runs here")),
        false => Ok(found),
    }
}

fn ask(path: &Path, command: &str) -> io::Result<Value> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    writeln!(&stream, "{}", json!({ "command": command }))?;
    read_line(&stream)
}

fn read_line(stream: &UnixStream) -> io::Result<Value> {
    let mut line = String::new();
    BufReader::new(stream.take(LINE_MAX)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

/// The other side is a process on this host that has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(2);

/// 255 channels with their names and times are a tenth of it.
const LINE_MAX: u64 = 1 << 20;
