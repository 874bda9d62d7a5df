//! Counts of symbols, and their entropy.

/// Number of occurrences of each symbol.
pub(crate) type Histogram = [u32; 256];

/// Counts `symbols`, which must be fewer than 2^32.
pub(crate) fn count(symbols: &[u8]) -> Histogram {
    tensorcask_kernels::bytes::histogram(symbols)
}

/// Estimates the counts of `symbols`, which must be fewer than 2^32. Counts every 13th stretch of a long slice and
/// scales the counts up.
pub(crate) fn count_about(symbols: &[u8]) -> Histogram {
    const STRETCH: usize = 1024;
    // An odd step samples all columns of a matrix whose rows are a power of 2.
    let every = if symbols.len() < 64 * STRETCH { 1 } else { 13 };
    let mut histogram = [0u32; 256];
    for stretch in symbols.chunks(STRETCH).step_by(every) {
        for (sum, n) in histogram.iter_mut().zip(count(stretch)) {
            *sum = sum.saturating_add(n.saturating_mul(every as u32));
        }
    }
    histogram
}

/// log2(1 + i/256) in units of 1/65536. The table is computed in integers, so every machine chooses the same codes.
const LOG2_FRACTION: [u32; 257] = {
    let mut table = [0u32; 257];
    let mut i = 0;
    while i <= 256 {
        // Each squaring of 1 + i/256, in units of 1/2^31, yields one bit of the logarithm.
        let mut x: u64 = (256 + i as u64) << 23;
        let mut bits = 0u32;
        let mut k = 0;
        while k < 17 {
            if x >= 1 << 32 {
                // Only 1 + 256/256 gets here; its logarithm is 1.
                bits = 1 << 17;
                break;
            }
            x = (x * x) >> 31;
            bits <<= 1;
            if x >= 1 << 32 {
                bits |= 1;
                x >>= 1;
            }
            k += 1;
        }
        table[i] = bits.div_ceil(2);
        i += 1;
    }
    table
};

/// Returns log2 of `x` > 0 in units of 1/65536.
fn log2(x: u32) -> u64 {
    let exponent = 31 - x.leading_zeros();
    let fraction = if exponent >= 8 { (x >> (exponent - 8)) & 255 } else { (x << (8 - exponent)) & 255 };
    (u64::from(exponent) << 16) + u64::from(LOG2_FRACTION[fraction as usize])
}

/// Returns the bits that an ideal order-0 coder takes for all counted symbols.
pub(crate) fn entropy_bits(histogram: &[u32]) -> u64 {
    let total: u64 = histogram.iter().map(|&n| u64::from(n)).sum();
    let all = u32::try_from(total).unwrap_or(u32::MAX);
    if all == 0 {
        return 0;
    }
    let log2_of_all = log2(all);
    // A chunk of few elements has few symbols, so most groups of counts are empty.
    let groups = histogram.chunks(8).filter(|group| group.iter().fold(0, |any, n| any | n) > 0);
    let ideal: u64 = groups.flatten().filter(|&&n| n > 0).map(|&n| u64::from(n) * log2_of_all.saturating_sub(log2(n))).sum();
    ideal >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_is_that_of_the_formula() {
        for histogram in [vec![1, 1], vec![5, 0, 11, 90, 1000], vec![65_536], vec![3; 256], vec![1 << 17, 1]] {
            let total: f64 = histogram.iter().map(|&n| f64::from(n)).sum();
            let exact: f64 = histogram.iter().filter(|&&n| n > 0).map(|&n| f64::from(n) * (total / f64::from(n)).log2()).sum();
            let ours = entropy_bits(&histogram) as f64;
            assert!((ours - exact).abs() <= 1.0 + 0.006 * total, "{histogram:?}: {ours} for {exact}");
        }
    }
}
