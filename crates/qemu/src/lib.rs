//! A running, unmodified QEMU seen from outside: QMP, its RAM, a userfaultfd in it, its device state.
