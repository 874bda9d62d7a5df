//! Ends of runs of equal symbols.

/// Number of symbols that are compared as a whole. Most groups of long runs have no end.
const GROUP: usize = 64;

/// Calls `act` with each symbol that differs from the next one, and the position of the next one, until it returns false.
/// Returns whether it never did.
#[allow(clippy::little_endian_bytes, reason = "a kernel: the position of a byte in a word is its order")]
pub(crate) fn for_each_change(symbols: &[u8], mut act: impl FnMut(u8, usize) -> bool) -> bool {
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
