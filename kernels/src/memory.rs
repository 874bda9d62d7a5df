//! Memory whose lack is an error and does not end the process.

/// Memory is short.
#[derive(Debug, thiserror::Error)]
#[error("no memory for {count} items of {what}")]
pub struct OutOfMemory {
    count: usize,
    what: String,
    source: std::collections::TryReserveError,
}

/// Returns an empty vector with room for `count` items.
pub fn reserve<T>(count: usize, what: &str) -> Result<Vec<T>, OutOfMemory> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(count).map_err(|source| OutOfMemory { count, what: what.to_owned(), source })?;
    Ok(vec)
}

/// Returns a zeroed buffer of `bytes`.
pub fn zeroed(bytes: usize, what: &str) -> Result<Vec<u8>, OutOfMemory> {
    let mut vec = reserve(bytes, what)?;
    vec.resize(bytes, 0);
    Ok(vec)
}
