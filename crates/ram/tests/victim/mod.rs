//! A process of our own that stands in for a VM: it maps memory of every kind, and does with it what it is told.
//! It makes system calls and touches memory; what is right or wrong is for the tests to say.

#![allow(unsafe_code, reason = "forks, and makes system calls in the child")]
#![allow(dead_code, reason = "each test file uses its part of it")]

use libc::{c_int, c_long, c_void};
use ram::{Backing, Block, BlockId, File, Layout, PAGE, Region, Store};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// The process. It is killed when this is dropped.
pub struct Victim {
    pub pid: i32,
    asks: OwnedFd,
    answers: OwnedFd,
}

/// What the child is told.
#[derive(Clone, Copy)]
#[repr(C)]
enum Order {
    Call {
        number: c_long,
        args: [u64; 6],
    },
    /// Writes `value` at every `stride` bytes.
    Store {
        at: u64,
        bytes: u64,
        stride: u64,
        value: u64,
    },
    /// Reads at every `stride` bytes; answers the sum.
    Load {
        at: u64,
        bytes: u64,
        stride: u64,
    },
    /// Threads that write counters into random pages until told to stop.
    Storm {
        at: u64,
        pages: u64,
        threads: u64,
    },
    Calm,
    /// Makes a child that does nothing.
    Fork,
}

impl Victim {
    pub fn start() -> Self {
        let (child_asks, asks) = pipe();
        let (answers, child_answers) = pipe();
        // SAFETY: the child goes into its own loop and never returns into the test harness.
        match unsafe { libc::fork() } {
            0 => child(raw(&child_asks), raw(&child_answers)),
            pid if pid > 0 => Self { pid, asks, answers },
            _ => panic!("fork: {}", io::Error::last_os_error()),
        }
    }

    /// A system call made by the child.
    pub fn call(&self, number: c_long, args: &[u64]) -> io::Result<u64> {
        let mut all = [0; 6];
        all[..args.len()].copy_from_slice(args);
        match self.order(Order::Call { number, args: all }) {
            error @ -4095..0 => Err(io::Error::from_raw_os_error(-error as i32)),
            answer => Ok(answer as u64),
        }
    }

    pub fn store(&self, at: u64, bytes: u64, value: u64) {
        self.order(Order::Store { at, bytes, stride: PAGE as u64, value });
    }

    pub fn load(&self, at: u64, bytes: u64) -> u64 {
        self.order(Order::Load { at, bytes, stride: PAGE as u64 }) as u64
    }

    pub fn storm(&self, at: u64, pages: u64, threads: u64) {
        self.order(Order::Storm { at, pages, threads });
    }

    pub fn calm(&self) {
        self.order(Order::Calm);
    }

    /// Forks; the new process only waits. Its pid.
    pub fn fork(&self) -> u64 {
        self.order(Order::Fork) as u64
    }

    pub fn madvise(&self, at: u64, bytes: u64, advice: c_int) -> io::Result<u64> {
        self.call(libc::SYS_madvise, &[at, bytes, advice as u64])
    }

    pub fn munmap(&self, at: u64, bytes: u64) {
        self.call(libc::SYS_munmap, &[at, bytes]).unwrap();
    }

    pub fn mmap(&self, at: u64, bytes: u64, flags: c_int, fd: i64, offset: u64) -> io::Result<u64> {
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        self.call(libc::SYS_mmap, &[at, bytes, protection, flags as u64, fd as u64, offset])
    }

    pub fn punch(&self, fd: u64, offset: u64, bytes: u64) -> io::Result<u64> {
        let mode = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u64;
        self.call(libc::SYS_fallocate, &[fd, mode, offset, bytes])
    }

    /// Replaces the child's program. Returns once it runs.
    pub fn exec(&self, path: &'static std::ffi::CStr, arguments: u64) {
        let order =
            Order::Call { number: libc::SYS_execve, args: [path.as_ptr() as u64, arguments, 0, 0, 0, 0] };
        // SAFETY: plain data over a pipe.
        unsafe { libc::write(raw(&self.asks), (&raw const order).cast(), size_of::<Order>()) };
        let link = format!("/proc/{}/comm", self.pid);
        let name = path.to_str().unwrap().rsplit('/').next().unwrap();
        while std::fs::read_to_string(&link).unwrap().trim() != name {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// A descriptor of the child, taken over to us.
    pub fn take(&self, fd: u64) -> OwnedFd {
        // SAFETY: system calls without pointers; the descriptors are new and ours.
        unsafe {
            let pidfd = libc::syscall(libc::SYS_pidfd_open, self.pid, 0);
            assert!(pidfd >= 0, "pidfd_open: {}", io::Error::last_os_error());
            let pidfd = OwnedFd::from_raw_fd(pidfd as RawFd);
            let taken = libc::syscall(libc::SYS_pidfd_getfd, raw(&pidfd), fd, 0);
            assert!(taken >= 0, "pidfd_getfd: {}", io::Error::last_os_error());
            OwnedFd::from_raw_fd(taken as RawFd)
        }
    }

    /// A userfaultfd of the child, of which we have the only copy.
    pub fn uffd(&self) -> OwnedFd {
        let fd = self.call(libc::SYS_userfaultfd, &[libc::O_CLOEXEC as u64 | 1]).unwrap();
        let taken = self.take(fd);
        self.call(libc::SYS_close, &[fd]).unwrap();
        taken
    }

    /// Ends the child and waits for it.
    pub fn kill(&self) {
        // SAFETY: kills our own child, which was not waited for yet or is gone.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }

    fn order(&self, order: Order) -> i64 {
        let mut answer = 0i64;
        // SAFETY: plain data over pipes, of the sizes that the child expects.
        unsafe {
            let bytes = size_of::<Order>();
            let sent = libc::write(raw(&self.asks), (&raw const order).cast(), bytes);
            assert_eq!(sent, bytes as isize, "the child is gone");
            let got = libc::read(raw(&self.answers), (&raw mut answer).cast(), 8);
            assert_eq!(got, 8, "the child is gone");
        }
        answer
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Memory of the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Anonymous,
    AnonymousHuge,
    Memfd,
    SharedAnonymous,
    TmpfsHuge,
    Hugetlb,
    PrivateHugetlb,
    Disk,
    PrivateFile,
}

impl Kind {
    pub const ALL: [Self; 9] = [
        Self::Anonymous,
        Self::AnonymousHuge,
        Self::Memfd,
        Self::SharedAnonymous,
        Self::TmpfsHuge,
        Self::Hugetlb,
        Self::PrivateHugetlb,
        Self::Disk,
        Self::PrivateFile,
    ];

    pub fn is_hugetlb(self) -> bool {
        matches!(self, Self::Hugetlb | Self::PrivateHugetlb)
    }

    pub fn is_shared(self) -> bool {
        !matches!(self, Self::Anonymous | Self::AnonymousHuge | Self::PrivateHugetlb | Self::PrivateFile)
    }
}

/// A stretch of memory of the child, aligned to 2 MiB.
pub struct Memory {
    pub at: u64,
    pub bytes: u64,
    pub kind: Kind,
    /// The child's descriptor of the file behind it.
    pub fd: Option<u64>,
    pub region: Region,
    pub layout: Layout,
    _pool: Option<Pool>,
}

impl Memory {
    pub fn page(&self, page: u64) -> u64 {
        self.at + page * PAGE as u64
    }

    pub fn pages(&self) -> u64 {
        self.bytes / PAGE as u64
    }
}

impl Victim {
    /// Maps memory. `None`, and a line that says so, where this machine can't.
    pub fn map(&self, kind: Kind, bytes: u64) -> Option<Memory> {
        let pool = if kind.is_hugetlb() { Some(Pool::with(bytes)?) } else { None };
        let fd = self.file(kind, bytes)?;
        let shared = if kind.is_shared() { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let at = self.aligned(bytes, shared, fd)?;
        match kind {
            Kind::AnonymousHuge => drop(self.madvise(at, bytes, libc::MADV_HUGEPAGE)),
            Kind::Anonymous => drop(self.madvise(at, bytes, libc::MADV_NOHUGEPAGE)),
            _ => {}
        }
        let store = match kind {
            Kind::Hugetlb | Kind::PrivateHugetlb => Store::Hugetlb { page_bytes: HUGE },
            Kind::Disk | Kind::PrivateFile => Store::Disk,
            _ => Store::Shmem,
        };
        let path = format!("/proc/{}/map_files/{at:x}-{:x}", self.pid, at + bytes).into();
        // Files that were opened by name keep one that leads to them.
        let name = match (kind, fd) {
            (Kind::Disk | Kind::TmpfsHuge, Some(fd)) => format!("/proc/{}/fd/{fd}", self.pid),
            _ => format!("/{kind:?} (deleted)"),
        };
        let file = File { path, name, offset: 0, store };
        let backing = match kind {
            Kind::Anonymous | Kind::AnonymousHuge => Backing::Anonymous,
            Kind::PrivateHugetlb | Kind::PrivateFile => Backing::PrivateFile(file),
            _ => Backing::Shared(file),
        };
        let region =
            Region { block: BlockId(0), first_page: 0, pages: bytes / PAGE as u64, host: at, backing };
        let page_bytes = store.page_bytes();
        let layout = Layout::new(vec![Block { name: "ram".into(), used_bytes: bytes, page_bytes }]).unwrap();
        Some(Memory { at, bytes, kind, fd, region, layout, _pool: pool })
    }

    fn aligned(&self, bytes: u64, flags: c_int, fd: Option<u64>) -> Option<u64> {
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let area = self.mmap(0, bytes + 2 * HUGE, private, -1, 0).unwrap();
        let at = area.next_multiple_of(HUGE);
        // Room on both sides keeps the kernel from joining it with neighbours.
        let at = if at == area { at + HUGE } else { at };
        self.munmap(area, bytes + 2 * HUGE);
        let anonymous = if fd.is_none() { libc::MAP_ANONYMOUS } else { 0 };
        let flags = flags | anonymous | libc::MAP_FIXED_NOREPLACE;
        Some(self.mmap(at, bytes, flags, fd.map_or(-1, |fd| fd as i64), 0).unwrap())
    }

    fn file(&self, kind: Kind, bytes: u64) -> Option<Option<u64>> {
        let fd = match kind {
            Kind::Anonymous | Kind::AnonymousHuge | Kind::SharedAnonymous => return Some(None),
            Kind::Memfd => self.memfd(0),
            Kind::Hugetlb | Kind::PrivateHugetlb => self.memfd(libc::MFD_HUGETLB),
            Kind::TmpfsHuge => self.tmpfs()?,
            Kind::Disk | Kind::PrivateFile => {
                self.open_unnamed(libc::AT_FDCWD as u64, c"/var/tmp".as_ptr() as u64)
            }
        };
        self.call(libc::SYS_ftruncate, &[fd, bytes]).unwrap();
        Some(Some(fd))
    }

    fn memfd(&self, flags: u32) -> u64 {
        // The child has our string at the same address.
        self.call(libc::SYS_memfd_create, &[c"victim".as_ptr() as u64, u64::from(flags)]).unwrap()
    }

    fn open_unnamed(&self, at: u64, path: u64) -> u64 {
        let flags = (libc::O_TMPFILE | libc::O_RDWR) as u64;
        self.call(libc::SYS_openat, &[at, path, flags, 0o600]).unwrap()
    }

    /// A file on a tmpfs of huge pages that is mounted nowhere, so there is nothing to unmount.
    fn tmpfs(&self) -> Option<u64> {
        const SET_STRING: u64 = 1;
        const CREATE: u64 = 6;
        let text = |text: &'static std::ffi::CStr| text.as_ptr() as u64;
        let mount = || -> io::Result<u64> {
            let context = self.call(libc::SYS_fsopen, &[text(c"tmpfs"), 0])?;
            self.call(libc::SYS_fsconfig, &[context, SET_STRING, text(c"huge"), text(c"always"), 0])?;
            self.call(libc::SYS_fsconfig, &[context, CREATE, 0, 0, 0])?;
            self.call(libc::SYS_fsmount, &[context, 0, 0])
        };
        match mount() {
            Ok(root) => Some(self.open_unnamed(root, text(c"."))),
            Err(error) => {
                println!("SKIPPED tmpfs with huge pages: cannot mount one: {error}");
                None
            }
        }
    }
}

/// Huge pages that were added to the machine's pool, and are given back.
struct Pool {
    pages: u64,
}

impl Pool {
    /// Twice what is mapped: a private mapping of a file may need both the file's page and its own.
    fn with(bytes: u64) -> Option<Self> {
        let _turn = turn();
        let pages = 2 * bytes / HUGE;
        let had = Self::size()?;
        std::fs::write(POOL, (had + pages).to_string()).ok();
        let got = Self::size()?.saturating_sub(had);
        let pool = Self { pages: got };
        if got < pages {
            println!("SKIPPED hugetlb: the pool grew by {got} of {pages} huge pages");
            drop(_turn);
            return None;
        }
        Some(pool)
    }

    fn size() -> Option<u64> {
        let text = std::fs::read_to_string(POOL);
        let size = text.as_deref().ok().and_then(|text| text.trim().parse().ok());
        if size.is_none() {
            println!("SKIPPED hugetlb: no {POOL}");
        }
        size
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _turn = turn();
        let had = Self::size().unwrap_or(0);
        std::fs::write(POOL, had.saturating_sub(self.pages).to_string()).ok();
    }
}

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Whether the tests may do what they need; prints why not.
pub fn privileged() -> bool {
    // SAFETY: a call without arguments.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!("SKIPPED: needs root, to trace a child and to open its map_files");
    }
    root
}

pub const HUGE: u64 = 2 << 20;

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

fn pipe() -> (OwnedFd, OwnedFd) {
    let mut fds = [0; 2];
    // SAFETY: an array of two, as the call takes.
    let rc = unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) };
    assert_eq!(rc, 0, "pipe: {}", io::Error::last_os_error());
    // SAFETY: the kernel just made both for us.
    unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) }
}

fn raw(fd: &OwnedFd) -> RawFd {
    std::os::fd::AsRawFd::as_raw_fd(fd)
}

/// The child: no harness, no allocation of ours, only orders.
fn child(asks: RawFd, answers: RawFd) -> ! {
    // SAFETY: the child is single-threaded here and owns its copies of the descriptors. Others' pipes must not stay
    // open in it, nor other tests' userfaultfds, which would outlive their owner.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::dup3(asks, 1000, 0);
        libc::dup3(answers, 1001, 0);
        libc::syscall(libc::SYS_close_range, 3, 999, 0);
        libc::syscall(libc::SYS_close_range, 1002, u32::MAX, 0);
    }
    loop {
        let mut order = Order::Calm;
        // SAFETY: an order as the parent wrote it, answered by eight bytes.
        unsafe {
            let bytes = size_of::<Order>();
            if libc::read(1000, (&raw mut order).cast(), bytes) != bytes as isize {
                libc::_exit(0);
            }
            let answer = obey(order);
            libc::write(1001, (&raw const answer).cast(), 8);
        }
    }
}

/// # Safety
/// The tests give addresses that the child has mapped.
unsafe fn obey(order: Order) -> i64 {
    match order {
        Order::Call { number, args: [a, b, c, d, e, f] } => {
            // SAFETY: as above.
            let answer = unsafe { libc::syscall(number, a, b, c, d, e, f) };
            if answer == -1 { -i64::from(io::Error::last_os_error().raw_os_error().unwrap()) } else { answer }
        }
        Order::Store { at, bytes, stride, value } => {
            for at in (at..at + bytes).step_by(stride as usize) {
                // SAFETY: as above.
                unsafe { (at as *mut u64).write_volatile(value) };
            }
            0
        }
        Order::Load { at, bytes, stride } => {
            let mut sum = 0u64;
            for at in (at..at + bytes).step_by(stride as usize) {
                // SAFETY: as above.
                sum = sum.wrapping_add(unsafe { (at as *const u64).read_volatile() });
            }
            (sum & i64::MAX as u64) as i64
        }
        // SAFETY: the child is alone in its memory, and the new process only waits until it is killed.
        Order::Fork => match unsafe { libc::fork() } {
            0 => loop {
                // SAFETY: as above. It ends with its parent.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::pause();
                }
            },
            pid => i64::from(pid),
        },
        Order::Storm { at, pages, threads } => {
            STORM.store(true, Ordering::SeqCst);
            for thread in 0..threads {
                let storm = move || storm(at, pages, thread);
                STORMERS.lock().unwrap().push(std::thread::spawn(storm));
            }
            0
        }
        Order::Calm => {
            STORM.store(false, Ordering::SeqCst);
            STORMERS.lock().unwrap().drain(..).for_each(|thread| thread.join().unwrap());
            0
        }
    }
}

static STORM: AtomicBool = AtomicBool::new(false);
static STORMERS: Mutex<Vec<std::thread::JoinHandle<()>>> = Mutex::new(Vec::new());

fn storm(at: u64, pages: u64, thread: u64) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(thread + 1);
    while STORM.load(Ordering::Relaxed) {
        for _ in 0..64 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let word = at + (state % pages) * PAGE as u64 + (state >> 32) % 512 * 8;
            // SAFETY: inside the memory that the test gave.
            unsafe { (word as *mut u64).write_volatile(state) };
        }
    }
}

/// For the address of a string in a call.
pub fn address<T: ?Sized>(at: *const T) -> u64 {
    at.cast::<c_void>() as u64
}

/// A swap file of our own, switched off again when this is dropped.
pub struct Swap {
    path: std::path::PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Swap {
    /// `None`, and a line that says so, where this machine can't. Pages go there only by `MADV_PAGEOUT`: the tests
    /// are far from using up memory.
    pub fn on() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let path = std::path::PathBuf::from(format!("/var/tmp/whimbrel-test-swap-{}", std::process::id()));
        let swap = Self { path, _turn: turn };
        match swap.enable() {
            Ok(()) => Some(swap),
            Err(error) => {
                println!("SKIPPED swap: cannot switch a swap file on: {error}");
                None
            }
        }
    }

    fn enable(&self) -> io::Result<()> {
        use std::os::unix::fs::OpenOptionsExt;
        const PAGES: usize = 4096;
        let mut bytes = vec![0u8; PAGES * PAGE];
        // union swap_header (include/linux/swap.h): version, last page, bad pages, and the signature at the end.
        bytes[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
        bytes[1028..1032].copy_from_slice(&(PAGES as u32 - 1).to_ne_bytes());
        bytes[PAGE - 10..PAGE].copy_from_slice(b"SWAPSPACE2");
        let mut file = std::fs::File::options();
        let mut file = file.write(true).create_new(true).mode(0o600).open(&self.path)?;
        io::Write::write_all(&mut file, &bytes)?;
        file.sync_all()?;
        // SAFETY: a string that lives through the call.
        match unsafe { libc::swapon(self.c_path().as_ptr(), 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn c_path(&self) -> std::ffi::CString {
        std::ffi::CString::new(self.path.to_str().unwrap()).unwrap()
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: a string that lives through the call.
        unsafe { libc::swapoff(self.c_path().as_ptr()) };
        std::fs::remove_file(&self.path).ok();
    }
}
