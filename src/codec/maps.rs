//! The dynamic 8-bit maps (Dettmers et al., arXiv 2110.02861). Spec: spec/codecs/blockwise8.md, clause 2.

use std::sync::LazyLock;

/// Number that each of the 256 codes represents, ascending.
pub(super) type Map = [f32; 256];

/// Map of numbers from -1 to 1.
pub(super) static SIGNED: LazyLock<Map> = LazyLock::new(|| dynamic(true));
/// Map of numbers from 0 to 1.
pub(super) static UNSIGNED: LazyLock<Map> = LazyLock::new(|| dynamic(false));
/// Map of each code to itself.
pub(super) static LINEAR: LazyLock<Map> = LazyLock::new(|| std::array::from_fn(|code| code as f32));

fn dynamic(signed: bool) -> Map {
    let mut all = vec![0.0, 1.0];
    for exponent in 0..7u32 {
        let count = 1u64 << (exponent + u32::from(!signed));
        for k in 0..count {
            // Both integers are exact in binary64, so every machine computes the same map.
            let above = 2 * count + 9 * (2 * k + 1);
            let below = 20 * count * 10u64.pow(6 - exponent);
            let number = (above as f64 / below as f64) as f32;
            all.push(number);
            if signed {
                all.push(-number);
            }
        }
    }
    all.sort_by(f32::total_cmp);
    let mut map = [0.0; 256];
    for (slot, number) in map.iter_mut().zip(all) {
        *slot = number;
    }
    map
}

/// Returns the code of the nearest number; of two equally near, the lower code.
pub(super) fn nearest(map: &Map, number: f32) -> u8 {
    let above = map.partition_point(|x| *x < number).min(255);
    let below = above.saturating_sub(1);
    let distance = |at: usize| map.get(at).map_or(f64::INFINITY, |x| (f64::from(*x) - f64::from(number)).abs());
    (if distance(below) <= distance(above) { below } else { above }) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_ascend_and_have_zero_and_one() {
        for map in [&*SIGNED, &*UNSIGNED] {
            assert!(map.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(map.contains(&0.0) && map[255] == 1.0);
        }
        assert_eq!((SIGNED[127], UNSIGNED[0]), (0.0, 0.0));
        assert!((SIGNED[0] + 0.992_968_75).abs() < 1e-6, "{}", SIGNED[0]);
        for (code, &number) in SIGNED.iter().enumerate() {
            assert_eq!(usize::from(nearest(&SIGNED, number)), code);
        }
    }
}
