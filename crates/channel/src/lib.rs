//! Connections of a migration: TCP and Unix streams, rate limit, listening and dialling.
