//! The report of a store: one HTML file that shows the history of a run without reading a tensor.
//!
//! [`gather`] reads the store into [`data`], whose size is bounded whatever the store holds. [`page`] writes the data as JSON
//! into an HTML page, beside the scripts that draw them. The page is filled by the browser, from text alone: a tensor name
//! never becomes markup. [`serve`] serves the page of a job that runs.

mod data;
mod gather;
mod layers;
mod page;
mod serve;
mod totals;

pub(crate) use data::{Bounds, Data, SnapshotRow};
pub(crate) use gather::gather;
pub(crate) use page::render;
pub(crate) use serve::serve;
