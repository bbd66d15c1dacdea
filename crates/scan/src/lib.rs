//! Zero checks of guest pages, as fast as memory can be read.
