//! Bytes of a migration: multifd packets and control messages. No I/O.
