//! Runs a migration: one collector and N channel threads per end.
