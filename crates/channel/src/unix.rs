//! Unix sockets: their files, and who may connect.

use crate::stream::set_send_timeout;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file of a socket that we listen on; removed at drop, unless another has taken its place.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|file| (file.dev(), file.ino()) == (self.device, self.inode));
        if ours {
            // Nobody is left to tell; the next listener removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Listens on a file that only this user may connect to.
pub(crate) fn bind_file(path: &Path) -> io::Result<(OwnedFd, SocketFile)> {
    remove_stale(path)?;
    let listener = stream_socket()?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    let metadata = fs::symlink_metadata(path)?;
    let file = SocketFile { path: path.into(), device: metadata.dev(), inode: metadata.ino() };
    // Before `listen` nobody can connect, so there is no moment with other permissions.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listen(&listener, Backlog::new(BACKLOG).expect("a backlog below SOMAXCONN"))?;
    Ok((listener, file))
}

/// Connects to a file. Fails with `TimedOut` if the listener's queue stays full.
pub(crate) fn connect_file(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let stream = stream_socket()?;
    set_send_timeout(stream.as_fd(), Some(timeout))?;
    connect(stream.as_raw_fd(), &UnixAddr::new(path)?).map_err(|error| match error {
        nix::Error::EAGAIN => io::ErrorKind::TimedOut.into(),
        other => io::Error::from(other),
    })?;
    set_send_timeout(stream.as_fd(), None)?;
    Ok(stream)
}

/// Removes the socket file of a listener that is gone. Anything else that is there stays, for `bind` to trip over.
fn remove_stale(path: &Path) -> io::Result<()> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if is_socket
        && connect_file(path, Duration::from_secs(1))
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    {
        fs::remove_file(path)?;
    }
    Ok(())
}

fn stream_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?)
}

/// Connections that may wait to be accepted: all channels of a migration, at most 255 and the control connection.
pub(crate) const BACKLOG: i32 = 256;
