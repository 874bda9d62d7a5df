//! Plans: which chunks a tensor has, which bytes a slice needs, which requests fetch them.

pub(crate) mod coalesce;
mod grid;
pub(crate) mod read;
pub(crate) mod recipe;

pub use grid::ChunkGrid;
