//! Test suites for the contracts of this library's traits. Run them on your own codec or object store.

pub mod codec;
pub mod fault;
pub mod store;
