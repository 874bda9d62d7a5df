//! Other formats in and out, so that coming and leaving are one call.

pub mod safetensors;
