//! The contracts of this library's traits as test suites: run them on your own codec or object store.

pub mod codec;
pub mod fault;
pub mod store;
