//! Element types and their chunk sizes.

/// Names and bits of all dtypes, ordered by code from 1.
pub(crate) const DTYPES: [(&str, usize); 25] = [
    ("bool", 8),
    ("u8", 8),
    ("u16", 16),
    ("u32", 32),
    ("u64", 64),
    ("i8", 8),
    ("i16", 16),
    ("i32", 32),
    ("i64", 64),
    ("f16", 16),
    ("bf16", 16),
    ("f32", 32),
    ("f64", 64),
    ("c64", 64),
    ("c128", 128),
    ("f8_e4m3", 8),
    ("f8_e5m2", 8),
    ("f8_e4m3fnuz", 8),
    ("f8_e5m2fnuz", 8),
    ("f8_e8m0", 8),
    ("f6_e2m3", 6),
    ("f6_e3m2", 6),
    ("f4_e2m1", 4),
    ("int4", 4),
    ("uint4", 4),
];

pub(crate) const U8: u8 = 2;
pub(crate) const U16: u8 = 3;
pub(crate) const U64: u8 = 5;
pub(crate) const I64: u8 = 9;
pub(crate) const BF16: u8 = 11;
pub(crate) const F32: u8 = 12;
pub(crate) const C64: u8 = 14;
pub(crate) const C128: u8 = 15;
pub(crate) const F6_E2M3: u8 = 21;
pub(crate) const INT4: u8 = 24;

/// Maximum number of elements of a chunk.
pub(crate) const CHUNK: usize = 1 << 18;

/// Returns the elements of a whole chunk of a shard (container 6.2).
pub(crate) fn chunk_elements(dtype: u8, shape: &[u64]) -> usize {
    let row = shape.last().map_or(1, |&last| last as usize);
    let bits = DTYPES[usize::from(dtype) - 1].1;
    // Least common multiple of the row with 8 bits.
    let unit = if bits >= 8 { row } else { row * 8 / (1 << row.trailing_zeros().min(3)) };
    if (1..=CHUNK).contains(&unit) { CHUNK / unit * unit } else { CHUNK }
}

/// Returns the bytes of the unit that codecs compare.
pub(crate) fn unit(dtype: u8) -> usize {
    match DTYPES[usize::from(dtype) - 1] {
        ("c64", _) => 4,
        ("c128", _) => 8,
        (_, bits) => (bits / 8).max(1),
    }
}
