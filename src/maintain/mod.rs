//! Maintenance: what a store needs once in a while, beside running writers and readers.

mod compact;
mod consolidate;
mod copy;
mod doctor;
mod gc;
mod mark;
mod reduce;

pub use compact::{CompactOptions, Compacted};
pub use copy::{Copier, CopyOptions, CopyReport};
pub use doctor::{DoctorOptions, DoctorReport};
pub use gc::{Deletable, GcOptions, GcReport};
pub use reduce::Reduced;
