//! A share of the kernel's pool of 2 MiB pages: taken for one VM, given back after it.

use std::fs;
use std::sync::Mutex;

use crate::Error;

/// Huge pages that the pool was grown by.
pub(crate) struct Hugepages {
    count: u64,
}

/// The pool is read, changed and written back; two tests must not do so at once.
static POOL: Mutex<()> = Mutex::new(());

const POOL_SIZE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

impl Hugepages {
    /// Grows the pool. Fails with [`Error::Missing`] if this user may not, or memory is too fragmented.
    pub fn reserve(count: u64) -> Result<Self, Error> {
        let _guard = POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let before = pool_size()?;
        resize(before + count)?;
        let after = pool_size()?;
        if after < before + count {
            resize(before)?;
            return Err(Error::missing(format!(
                "the kernel gave {} of {count} huge pages of 2 MiB",
                after - before
            )));
        }
        Ok(Hugepages { count })
    }
}

impl Drop for Hugepages {
    fn drop(&mut self) {
        let _guard = POOL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Err(error) = pool_size().and_then(|size| resize(size.saturating_sub(self.count))) {
            eprintln!("{} huge pages stay reserved: {error}", self.count);
        }
    }
}

fn pool_size() -> Result<u64, Error> {
    let text = fs::read_to_string(POOL_SIZE)
        .map_err(|error| Error::missing(format!("no huge pages of 2 MiB: {error}")))?;
    Ok(text.trim().parse().expect("the kernel prints a number"))
}

fn resize(count: u64) -> Result<(), Error> {
    fs::write(POOL_SIZE, count.to_string())
        .map_err(|error| Error::missing(format!("can't reserve huge pages of 2 MiB: {error} (root only)")))
}
