//! The code against `spec/`: its tables, its clauses and its test vectors.

mod casks;
mod codecs;
mod directories;
mod entropy;
mod fixed;
mod pages;
mod positions;
mod sealed;
mod vectors;
