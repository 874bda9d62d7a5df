//! Inner loops and the only unsafe code. Each has a scalar form; SIMD forms are tested equal to it.

#[allow(unsafe_code, reason = "mapping a file is unsafe; the safety argument stands at the call")]
pub(crate) mod map;
pub(crate) mod mask;
