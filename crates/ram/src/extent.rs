//! Where a file has data and where it has holes. Allocates nothing and reads nothing.

#![expect(unsafe_code, reason = "lseek to data and holes")]

use crate::PAGE;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// The stretches of `range` that have data, in whole pages, ascending. A file system that can't tell calls all of
/// it data. Bytes after the end of the file are a hole.
pub(crate) struct Extents<'a> {
    file: &'a File,
    range: Range<u64>,
}

impl<'a> Extents<'a> {
    pub(crate) fn new(file: &'a File, range: Range<u64>) -> Self {
        Self { file, range }
    }

    fn after(&mut self) -> io::Result<Option<Range<u64>>> {
        let Range { start, end } = self.range;
        let Some(data) = next_data(self.file, start..end)? else {
            self.range.start = end;
            return Ok(None);
        };
        let hole = match seek(self.file, data, libc::SEEK_HOLE) {
            Ok(at) => at,
            // Punched since we asked: then the next stretch is found from here.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => data,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ESPIPE)) => end,
            Err(error) => return Err(error),
        };
        let last = hole.max(data + 1).next_multiple_of(PAGE as u64).min(end);
        self.range.start = last;
        Ok(Some(data..last))
    }
}

impl Iterator for Extents<'_> {
    type Item = io::Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.after().transpose()
    }
}

/// Where data begins in these bytes, on a page, if there is any. All of it is data where the file can't tell.
pub(crate) fn next_data(file: &File, range: Range<u64>) -> io::Result<Option<u64>> {
    if range.is_empty() {
        return Ok(None);
    }
    match seek(file, range.start, libc::SEEK_DATA) {
        Ok(data) if data < range.end => Ok(Some((data - data % PAGE as u64).max(range.start))),
        Ok(_) => Ok(None),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENXIO) => Ok(None),
            Some(libc::EINVAL | libc::ESPIPE) => Ok(Some(range.start)),
            _ => Err(error),
        },
    }
}

fn seek(file: &File, from: u64, whence: i32) -> io::Result<u64> {
    // SAFETY: a system call without pointers. The file offset that it moves is used by nobody.
    let at = unsafe { libc::lseek(file.as_raw_fd(), from as i64, whence) };
    u64::try_from(at).map_err(|_| io::Error::last_os_error())
}
