//! RAM blocks: the named stretches of memory a VM is made of. Both ends must agree on them before a page moves.

use crate::PAGE;
use serde::{Deserialize, Serialize};

/// Which RAM block of a [`Layout`], counted from 0 in the order of the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u16);

impl BlockId {
    /// The block's position in its layout.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// One RAM block: guest memory, video memory, a ROM or a firmware table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Block {
    /// QEMU's name of it, for example `pc.ram`; 1 to 255 bytes, the room that a multifd packet has.
    pub name: String,
    /// Bytes in use. A resizable block may have more reserved; that part holds nothing.
    pub used_bytes: u64,
    /// Bytes of a page of its backing: 4096, or the huge page size on hugetlbfs. May differ between the ends.
    pub page_bytes: u64,
}

impl Block {
    /// Pages of [`PAGE`] bytes in use.
    pub fn pages(&self) -> u64 {
        self.used_bytes / PAGE as u64
    }
}

/// Every RAM block of a VM, checked once: from here on names are unique and sizes are sane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Block>", into = "Vec<Block>")]
pub struct Layout {
    blocks: Vec<Block>,
}

impl Layout {
    /// Takes the blocks of a VM. Fails on what can't be a VM's RAM, so a hostile peer's list ends here.
    pub fn new(blocks: Vec<Block>) -> Result<Self, LayoutError> {
        if blocks.is_empty() || blocks.len() > BLOCKS_MAX {
            return Err(LayoutError::Count { count: blocks.len() });
        }
        for (at, block) in blocks.iter().enumerate() {
            check(block)?;
            if blocks[..at].iter().any(|earlier| earlier.name == block.name) {
                return Err(LayoutError::Twice { name: block.name.clone() });
            }
        }
        let total = blocks.iter().try_fold(0u64, |sum, block| sum.checked_add(block.used_bytes));
        match total {
            Some(bytes) if bytes <= RAM_BYTES_MAX => Ok(Self { blocks }),
            _ => Err(LayoutError::TooLarge { bytes: total.unwrap_or(u64::MAX) }),
        }
    }

    /// The blocks, in the order of their ids.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (BlockId, &Block)> {
        self.blocks.iter().enumerate().map(|(at, block)| (BlockId(at as u16), block))
    }

    /// The block of an id. Panics if the id is of another layout.
    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }

    /// How many blocks there are; at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a layout is never empty")]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The id of the block with this name.
    pub fn find(&self, name: &str) -> Option<BlockId> {
        self.blocks.iter().position(|block| block.name == name).map(|at| BlockId(at as u16))
    }

    /// Pages in use over all blocks.
    pub fn pages(&self) -> u64 {
        self.blocks.iter().map(Block::pages).sum()
    }

    /// This target's layout in the words of the source: the same blocks, ids and backing, under the names that the
    /// source has for them. They match by name, in any order. Main memory is named after its backend, so one block
    /// of each end may be left over; if those two are of one size they are the same memory. Fails naming the first
    /// block that differs.
    pub fn in_words_of(&self, source: &Layout) -> Result<Layout, LayoutError> {
        let left_of = |one: &Layout, other: &Layout| -> Vec<Block> {
            one.blocks.iter().filter(|block| other.find(&block.name).is_none()).cloned().collect()
        };
        let (here, there) = (left_of(self, source), left_of(source, self));
        let mut layout = self.clone();
        match (here.as_slice(), there.as_slice()) {
            ([], []) => {}
            ([own], [theirs]) if own.used_bytes == theirs.used_bytes => {
                let id = self.find(&own.name).expect("it was just listed");
                layout.blocks[id.index()].name.clone_from(&theirs.name);
            }
            (_, [missing, ..]) => return Err(LayoutError::Missing { name: missing.name.clone() }),
            ([extra, ..], []) => return Err(LayoutError::Extra { name: extra.name.clone() }),
        }
        for Block { name, used_bytes: source_bytes, .. } in source.blocks.iter().cloned() {
            let here = layout.find(&name).expect("every name of the source was found");
            let target_bytes = layout.block(here).used_bytes;
            if target_bytes != source_bytes {
                return Err(LayoutError::Size { name, source_bytes, target_bytes });
            }
        }
        Ok(layout)
    }
}

fn check(block: &Block) -> Result<(), LayoutError> {
    let name = block.name.clone();
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
        return Err(LayoutError::Name { name });
    }
    let bytes = block.used_bytes;
    if bytes == 0 || !bytes.is_multiple_of(PAGE as u64) {
        return Err(LayoutError::Bytes { name, bytes });
    }
    let page_bytes = block.page_bytes;
    if page_bytes < PAGE as u64 || !page_bytes.is_power_of_two() {
        return Err(LayoutError::PageBytes { name, page_bytes });
    }
    Ok(())
}

impl TryFrom<Vec<Block>> for Layout {
    type Error = LayoutError;

    fn try_from(blocks: Vec<Block>) -> Result<Self, LayoutError> {
        Self::new(blocks)
    }
}

impl From<Layout> for Vec<Block> {
    fn from(layout: Layout) -> Self {
        layout.blocks
    }
}

/// Why a list of RAM blocks is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum LayoutError {
    #[error("{count} RAM blocks; a VM has 1 to {BLOCKS_MAX}")]
    Count { count: usize },
    #[error("RAM block name {name:?} is not 1 to {NAME_BYTES_MAX} bytes of text")]
    Name { name: String },
    #[error("RAM block {name} has {bytes} bytes, which is not a number of {PAGE}-byte pages")]
    Bytes { name: String, bytes: u64 },
    #[error("RAM block {name} has pages of {page_bytes} bytes, which is not a power of two from {PAGE}")]
    PageBytes { name: String, page_bytes: u64 },
    #[error("RAM block {name} is listed twice")]
    Twice { name: String },
    #[error("{bytes} bytes of RAM; at most {RAM_BYTES_MAX} can be moved")]
    TooLarge { bytes: u64 },
    #[error("the target has no RAM block {name}: start it with the same machine, memory and devices")]
    Missing { name: String },
    #[error("only the target has RAM block {name}: start it with the same machine, memory and devices")]
    Extra { name: String },
    #[error(
        "RAM block {name} has {source_bytes} bytes at the source and {target_bytes} at the target: start it with the \
         same memory"
    )]
    Size { name: String, source_bytes: u64, target_bytes: u64 },
}

/// A q35 with everything plugged has a few dozen; each costs a name and two bitmaps.
const BLOCKS_MAX: usize = 1024;

/// The name field of a multifd packet is 256 bytes with its NUL (QEMU, migration/multifd.h).
const NAME_BYTES_MAX: usize = 255;

/// 64 TiB, a bitmap of 2 GiB: above what QEMU's x86 machines take today.
const RAM_BYTES_MAX: u64 = 64 << 40;

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str, used_bytes: u64) -> Block {
        Block { name: name.into(), used_bytes, page_bytes: PAGE as u64 }
    }

    fn layout(blocks: &[(&str, u64)]) -> Layout {
        Layout::new(blocks.iter().map(|(name, bytes)| block(name, *bytes)).collect()).unwrap()
    }

    #[test]
    fn a_list_that_cannot_be_ram_is_refused_with_its_value() {
        assert_eq!(Layout::new(vec![]), Err(LayoutError::Count { count: 0 }));
        assert_eq!(
            Layout::new(vec![block("a", 4096), block("a", 4096)]),
            Err(LayoutError::Twice { name: "a".into() })
        );
        assert!(matches!(Layout::new(vec![block("a", 100)]), Err(LayoutError::Bytes { bytes: 100, .. })));
        assert!(matches!(Layout::new(vec![block("a", 0)]), Err(LayoutError::Bytes { bytes: 0, .. })));
        assert!(matches!(Layout::new(vec![block("", 4096)]), Err(LayoutError::Name { .. })));
        let huge = u64::MAX - 4095;
        assert!(matches!(
            Layout::new(vec![block("a", huge), block("b", huge)]),
            Err(LayoutError::TooLarge { bytes: u64::MAX })
        ));
    }

    #[test]
    fn blocks_match_by_name_in_any_order() {
        let source = layout(&[("ram", 8192), ("rom", 4096)]);
        let target = layout(&[("rom", 4096), ("ram", 8192)]);
        assert_eq!(target.in_words_of(&source), Ok(target));
    }

    #[test]
    fn main_memory_may_be_named_after_another_backend() {
        let source = layout(&[("pc.ram", 8192), ("rom", 4096)]);
        let target = layout(&[("rom", 4096), ("memfd0", 8192)]);
        let known = layout(&[("rom", 4096), ("pc.ram", 8192)]);
        assert_eq!(target.in_words_of(&source), Ok(known));
    }

    #[test]
    fn a_target_that_differs_is_refused_by_the_name_of_the_block() {
        let source = layout(&[("ram", 8192), ("rom", 4096)]);
        let missing = layout(&[("ram", 8192)]).in_words_of(&source);
        assert_eq!(missing, Err(LayoutError::Missing { name: "rom".into() }));
        let extra = layout(&[("ram", 8192), ("rom", 4096), ("vga", 4096)]).in_words_of(&source);
        assert_eq!(extra, Err(LayoutError::Extra { name: "vga".into() }));
        let size = layout(&[("ram", 4096), ("rom", 4096)]).in_words_of(&source);
        assert!(matches!(size, Err(LayoutError::Size { source_bytes: 8192, target_bytes: 4096, .. })));
        let other = layout(&[("mem", 4096), ("rom", 4096)]).in_words_of(&source);
        assert_eq!(other, Err(LayoutError::Missing { name: "ram".into() }));
    }
}
