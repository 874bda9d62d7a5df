//! Server and client together, over real connections.

mod hostile;
mod reading;
mod refusals;
mod replicas;
mod session;
mod support;
mod throughput;
