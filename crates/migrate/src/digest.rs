//! A digest of all RAM of a VM, equal at both ends when every page is, whatever is a hole and what only zero.

use crate::Trouble;
use ram::{Batch, BlockId, Layout, PAGE, PageSet, PageSets, Reach, Window};
use scan::Kernel;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use wire::Hash;

/// One digest for each block: its name and its hash. The guest must stand still. Pages that are zero leave
/// no mark, so holes are never read. `threads` share the work.
pub fn digest<R: Reach + ?Sized>(
    ram: &R,
    layout: &Layout,
    kernel: &Kernel,
    threads: usize,
) -> Result<Vec<(String, Hash)>, Trouble> {
    let mut populated = PageSets::new(layout);
    ram.populated(&mut populated)?;
    let chunks = chunks(layout);
    let done = Mutex::new(vec![None; chunks.len()]);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let work = || worker(ram, &populated, kernel, &chunks, &next, &done);
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a digest thread does not panic"))
    })?;
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(layout.iter().map(|(id, block)| (block.name.clone(), combine(id, &chunks, &done))).collect())
}

/// A part of a block that one thread digests.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    block: BlockId,
    first: u64,
    end: u64,
}

fn chunks(layout: &Layout) -> Vec<Chunk> {
    let of_block = |(block, pages): (BlockId, u64)| {
        (0..pages).step_by(CHUNK_PAGES as usize).map(move |first| Chunk {
            block,
            first,
            end: pages.min(first + CHUNK_PAGES),
        })
    };
    layout.iter().map(|(id, block)| (id, block.pages())).flat_map(of_block).collect()
}

type Digests = Mutex<Vec<Option<blake3::Hash>>>;

fn worker<R: Reach + ?Sized>(
    ram: &R,
    populated: &PageSets,
    kernel: &Kernel,
    chunks: &[Chunk],
    next: &AtomicUsize,
    done: &Digests,
) -> Result<(), Trouble> {
    let mut window = Window::new(BATCH_PAGES as usize);
    let mut batch = Batch::with_room(BATCH_PAGES as usize);
    loop {
        let at = next.fetch_add(1, Relaxed);
        let Some(chunk) = chunks.get(at) else { return Ok(()) };
        let hash = of_chunk(ram, &populated[chunk.block], kernel, *chunk, &mut window, &mut batch)?;
        done.lock().expect("no holder panics")[at] = hash;
    }
}

/// None where every page is zero.
fn of_chunk<R: Reach + ?Sized>(
    ram: &R,
    populated: &PageSet,
    kernel: &Kernel,
    chunk: Chunk,
    window: &mut Window,
    batch: &mut Batch,
) -> Result<Option<blake3::Hash>, Trouble> {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = [0; PAGE];
    batch.block = chunk.block;
    let mut from = chunk.first;
    while let Some(first) = populated.next_in(from).filter(|&first| first < chunk.end) {
        from = populated.next_out(first).min(chunk.end).min(first + BATCH_PAGES);
        batch.pages.clear();
        batch.pages.extend(first..from);
        let pages = window.load(ram, batch)?;
        for (place, page) in batch.pages.iter().enumerate() {
            if !kernel.is_zero(pages.page(place)) {
                pages.page(place).copy_to(&mut bytes);
                hasher.update(&page.to_le_bytes());
                hasher.update(&bytes);
            }
        }
    }
    Ok((hasher.count() > 0).then(|| hasher.finalize()))
}

fn combine(block: BlockId, chunks: &[Chunk], done: &[Option<blake3::Hash>]) -> Hash {
    let mut hasher = blake3::Hasher::new();
    for (chunk, hash) in chunks.iter().zip(done).filter(|(chunk, _)| chunk.block == block) {
        if let Some(hash) = hash {
            hasher.update(&chunk.first.to_le_bytes());
            hasher.update(hash.as_bytes());
        }
    }
    Hash(*hasher.finalize().as_bytes())
}

/// 64 MiB: enough to share a small VM among a few threads.
const CHUNK_PAGES: u64 = 16384;

/// 512 KiB, as in a packet.
const BATCH_PAGES: u64 = 128;
