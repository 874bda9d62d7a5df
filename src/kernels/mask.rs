//! Compare two arrays of equal units, pack which differ into a bit mask with the new values, and the inverse.

/// Units of `width` bytes (1, 2, 4 or 8) in which `new` differs from `base`.
pub(crate) fn count_changed(width: usize, base: &[u8], new: &[u8]) -> usize {
    match width {
        1 => count::<1>(base, new),
        2 => count::<2>(base, new),
        4 => count::<4>(base, new),
        _ => count::<8>(base, new),
    }
}

/// The mask (least significant bit first, unused bits zero) and the values of changed units.
pub(crate) fn pack(width: usize, base: &[u8], new: &[u8]) -> (Vec<u8>, Vec<u8>) {
    match width {
        1 => pack_width::<1>(base, new),
        2 => pack_width::<2>(base, new),
        4 => pack_width::<4>(base, new),
        _ => pack_width::<8>(base, new),
    }
}

/// Writes `values` over the units of `out` whose bit is set. The caller has compared the popcount with the values.
pub(crate) fn expand(width: usize, mask: &[u8], values: &[u8], out: &mut [u8]) {
    match width {
        1 => expand_width::<1>(mask, values, out),
        2 => expand_width::<2>(mask, values, out),
        4 => expand_width::<4>(mask, values, out),
        _ => expand_width::<8>(mask, values, out),
    }
}

fn count<const W: usize>(base: &[u8], new: &[u8]) -> usize {
    let (base, new) = (base.as_chunks::<W>().0, new.as_chunks::<W>().0);
    base.iter().zip(new).filter(|(a, b)| a != b).count()
}

fn pack_width<const W: usize>(base: &[u8], new: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (base, new) = (base.as_chunks::<W>().0, new.as_chunks::<W>().0);
    let mut mask = Vec::with_capacity(new.len().div_ceil(8));
    let mut values = Vec::new();
    for (base, new) in base.chunks(8).zip(new.chunks(8)) {
        let mut bits = 0u8;
        for (i, (a, b)) in base.iter().zip(new).enumerate() {
            bits |= u8::from(a != b) << i;
        }
        mask.push(bits);
        while bits != 0 {
            values.extend_from_slice(&new[bits.trailing_zeros() as usize]);
            bits &= bits - 1;
        }
    }
    (mask, values)
}

fn expand_width<const W: usize>(mask: &[u8], values: &[u8], out: &mut [u8]) {
    let mut values = values.as_chunks::<W>().0.iter();
    for (&byte, units) in mask.iter().zip(out.as_chunks_mut::<W>().0.chunks_mut(8)) {
        let mut bits = byte;
        while bits != 0 {
            if let (Some(unit), Some(value)) = (units.get_mut(bits.trailing_zeros() as usize), values.next()) {
                *unit = *value;
            }
            bits &= bits - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expand_inverts_pack_at_every_width_and_length() {
        let mut seed = 7u64;
        let mut next = move || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 56) as u8
        };
        for width in [1, 2, 4, 8] {
            for units in [0, 1, 7, 8, 9, 64, 100] {
                let base: Vec<u8> = (0..units * width).map(|_| next()).collect();
                let new: Vec<u8> = base.iter().map(|&b| if next() < 60 { next() } else { b }).collect();
                let (mask, values) = pack(width, &base, &new);
                assert_eq!(values.len(), count_changed(width, &base, &new) * width);
                let mut out = base.clone();
                expand(width, &mask, &values, &mut out);
                assert_eq!(out, new);
            }
        }
    }
}
