//! Histograms of bytes.

/// How often each byte occurs. Four tables, so that repeats of a byte do not wait for one another.
pub(crate) fn histogram(bytes: &[u8]) -> [u32; 256] {
    let mut tables = [[0u32; 256]; 4];
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        for (i, &byte) in word.iter().enumerate() {
            let slot = &mut tables[i & 3][usize::from(byte)];
            *slot = slot.wrapping_add(1);
        }
    }
    for &byte in rest {
        tables[0][usize::from(byte)] += 1;
    }
    let [mut sum, b, c, d] = tables;
    for (i, slot) in sum.iter_mut().enumerate() {
        *slot = slot.wrapping_add(b[i]).wrapping_add(c[i]).wrapping_add(d[i]);
    }
    sum
}
