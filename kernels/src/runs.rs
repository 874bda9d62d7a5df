//! Ends of runs of equal symbols.

/// Number of symbols that are compared as a whole. Most groups of long runs have no end.
const GROUP: usize = 64;

super::for_every_level! {
    /// Counts the symbols that differ from the next one.
    pub fn count_changes / count_changes_at(symbols: &[u8]) -> usize = count_changes_any;
}

#[inline(always)]
fn count_changes_any(symbols: &[u8]) -> usize {
    let Some((_, next)) = symbols.split_first() else { return 0 };
    let here = &symbols[..next.len()];
    // At most 64 changes in a group, so its sum fits into a byte.
    let of_group = |(here, next): (&[u8], &[u8])| here.iter().zip(next).fold(0u8, |sum, (a, b)| sum.wrapping_add(u8::from(a != b)));
    let groups = here.as_chunks::<GROUP>().0.iter().zip(next.as_chunks::<GROUP>().0);
    let rest = (here.as_chunks::<GROUP>().1, next.as_chunks::<GROUP>().1);
    groups.map(|(here, next)| usize::from(of_group((here, next)))).fold(usize::from(of_group(rest)), usize::wrapping_add)
}

/// Calls `act` with each symbol that differs from the next one, and the position of the next one, until it returns false.
/// Returns whether it never did.
#[allow(clippy::little_endian_bytes, reason = "a kernel: the position of a byte in a word is its order")]
pub fn for_each_change(symbols: &[u8], mut act: impl FnMut(u8, usize) -> bool) -> bool {
    let Some((_, next)) = symbols.split_first() else { return true };
    let (groups, _) = symbols[..next.len()].as_chunks::<GROUP>();
    for (at, (here, next)) in groups.iter().zip(next.as_chunks::<GROUP>().0).enumerate() {
        if here == next {
            continue;
        }
        let words = here.as_chunks::<8>().0.iter().zip(next.as_chunks::<8>().0);
        for (word, (here, next)) in words.enumerate() {
            let here = u64::from_le_bytes(*here);
            let mut changes = here ^ u64::from_le_bytes(*next);
            while changes != 0 {
                let bit = changes.trailing_zeros() & 56;
                changes &= !(0xff << bit);
                if !act((here >> bit) as u8, GROUP * at + 8 * word + (bit / 8) as usize + 1) {
                    return false;
                }
            }
        }
    }
    let done = GROUP * groups.len();
    let rest = symbols[done..].iter().zip(&next[done..]).enumerate().filter(|(_, (here, next))| here != next);
    for (at, (&here, _)) in rest {
        if !act(here, done + at + 1) {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::count_changes_at;
    use crate::Level;

    #[test]
    fn every_level_counts_all_changes() {
        for count in [0usize, 1, 63, 64, 65, 66, 1000] {
            let symbols: Vec<u8> = (0..count).map(|i| (i * i / 7 % 3) as u8).collect();
            let expected = symbols.windows(2).filter(|pair| pair[0] != pair[1]).count();
            for level in Level::available() {
                assert_eq!(count_changes_at(level, &symbols), expected, "{level:?}, {count} symbols");
            }
        }
    }
}
