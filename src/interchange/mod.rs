//! Import and export of other formats.

pub mod safetensors;
