//! A minimal QMP client for the harness: connect, execute, close. Events are dropped. One connection per use,
//! because QEMU serves one client of a socket at a time.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// One connection to a QMP socket, past the greeting.
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

/// Why a command gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// QEMU refused it.
    #[error("{class}: {description}")]
    Refused {
        /// QEMU's error class.
        class: String,
        /// QEMU's words.
        description: String,
    },
    /// The connection failed, or nothing came in time.
    #[error("QMP: {0}")]
    Io(#[from] io::Error),
}

impl Qmp {
    /// Connects and leaves the negotiation. Fails if QEMU does not answer within `timeout`, which also bounds
    /// each answer later.
    pub fn connect(socket: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(timeout))?;
        let mut qmp = Qmp { stream: BufReader::new(stream) };
        qmp.read()?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs one command and gives what it returned.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.stream.get_mut().write_all(line.as_bytes())?;
        loop {
            let mut answer = self.read()?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
                return Err(QmpError::Refused { class: text("class"), description: text("desc") });
            }
        }
    }

    fn read(&mut self) -> Result<Value, QmpError> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        serde_json::from_str(&line).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error).into())
    }
}
