//! Input and output types: element types, shapes, rectangles, and borrowed and owned tensors.

mod bits;
mod dtype;
mod grid;
mod pattern;
mod role;
mod role_rules;
mod shape;
mod view;

pub use dtype::Dtype;
pub use grid::ChunkGrid;
pub use pattern::NamePatterns;
pub use role::{RoleAndParam, infer_role};
pub use role_rules::RoleRules;
pub use shape::{Rect, Slice};
pub use view::{Blob, Tensor, TensorView};

pub(crate) use bits::copy_run;
pub(crate) use pattern::TensorPattern;
pub(crate) use role::{is_moment, is_number, is_parameter};
pub(crate) use shape::{Run, contiguous_runs, element_count, element_span, format_shape, rects_of_run, tiles};
