//! A hash of the bytes of a row. Unlike CRC-32 it is not linear.
//!
//! Two rows with one CRC-32 can replace each other in a chunk, and the chunk keeps its CRC-32. So a check of rows that has to
//! find what the checksum of the chunk misses needs another function. Hashes stay in memory; no stored format has them.

/// Hash of a row: each step multiplies by an odd number and folds the upper half into the lower one, so a row that differs in
/// one word of eight bytes has another 64-bit state.
#[allow(clippy::little_endian_bytes, reason = "a kernel: one hash on every machine")]
pub fn row_hash(row: &[u8]) -> u32 {
    let (words, rest) = row.as_chunks::<8>();
    let mut last = [0; 8];
    for (slot, byte) in last.iter_mut().zip(rest) {
        *slot = *byte;
    }
    let state = words.iter().chain([&last]).fold(row.len() as u64, |state, word| mix(state ^ u64::from_le_bytes(*word)));
    (state >> 32) as u32
}

fn mix(word: u64) -> u64 {
    let product = word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ product >> 32
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::row_hash;

    #[test]
    fn every_bit_counts() {
        for length in [1, 7, 8, 9, 32, 61] {
            let row: Vec<u8> = (0..length).map(|at| (at * at % 251) as u8).collect();
            let flipped = (0..8 * row.len()).map(|bit| {
                let mut other = row.clone();
                other[bit / 8] ^= 1 << (bit % 8);
                row_hash(&other)
            });
            let hashes: BTreeSet<u32> = flipped.chain([row_hash(&row)]).collect();
            assert_eq!(hashes.len(), 8 * row.len() + 1);
        }
    }

    #[test]
    #[allow(clippy::little_endian_bytes, reason = "test data")]
    fn rows_with_one_crc_have_two_hashes() {
        let row: Vec<u8> = (0..64).collect();
        for at in 0..59 {
            let mut other = row.clone();
            // The polynomial of CRC-32.
            for (byte, bits) in other[at..].iter_mut().zip(0x1_db71_0641_u64.to_le_bytes()) {
                *byte ^= bits;
            }
            assert_eq!(crc32fast::hash(&row), crc32fast::hash(&other));
            assert_ne!(row_hash(&row), row_hash(&other));
        }
    }
}
