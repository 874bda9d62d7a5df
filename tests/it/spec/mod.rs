//! The code against `spec/`: tables, clauses and test vectors.

mod casks;
mod codecs;
mod directories;
mod entropy;
mod fixed;
mod pages;
mod positions;
mod sealed;
mod vectors;
