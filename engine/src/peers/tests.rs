//! Server and client together, over real connections.

mod support;

mod hostile;
mod reading;
mod refusals;
mod session;

mod replicas;
mod throughput;
