//! The fused multiply-add of binary32, exact on every processor.
//!
//! A trainer's processor rounds `a * b + c` once. A decoder must do the same, also where the processor has no such
//! instruction. There, the product and the sum are taken in binary64 and rounded *to odd*: an inexact sum gets an odd
//! last bit, which tells the final rounding on which side of a tie the exact value lies. The product of two binary32 is
//! exact in binary64, and its 53 bits are at least twice the 24 bits of the result plus two, so the result is rounded
//! as if once (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).

/// Returns `a * b + c`, rounded once. `HARD` says that the caller is compiled for a processor with the instruction.
/// Which NaN comes out is unspecified.
#[inline(always)]
pub fn fma<const HARD: bool>(a: f32, b: f32, c: f32) -> f32 {
    // Every 64-bit Arm processor has the instruction.
    if HARD || cfg!(target_arch = "aarch64") { a.mul_add(b, c) } else { soft(a, b, c) }
}

#[inline(always)]
fn soft(a: f32, b: f32, c: f32) -> f32 {
    let product = f64::from(a) * f64::from(b);
    let c = f64::from(c);
    let sum = product + c;
    // The error of the sum, exactly (Knuth).
    let virtual_c = sum - product;
    let error = (product - (sum - virtual_c)) + (c - virtual_c);
    let bits = sum.to_bits();
    // An infinite sum or NaN has an error of NaN, and stays.
    let is_inexact = (error > 0.0) | (error < 0.0);
    let is_even = bits & 1 == 0;
    let away_from_zero = (error > 0.0) == (sum > 0.0);
    let odd = if away_from_zero { bits.wrapping_add(1) } else { bits.wrapping_sub(1) };
    f64::from_bits(if is_inexact & is_even { odd } else { bits }) as f32
}

/// Whether the processor has the instruction, beside those of its [`Level`](super::Level).
#[cfg(target_arch = "x86_64")]
pub fn is_hard() -> bool {
    is_x86_feature_detected!("fma")
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::{fma, is_hard, soft};

    #[test]
    fn software_and_hardware_agree_to_the_bit() {
        #[target_feature(enable = "fma")]
        fn hard(a: f32, b: f32, c: f32) -> f32 {
            fma::<true>(a, b, c)
        }
        if !is_hard() {
            return;
        }
        let check = |a: f32, b: f32, c: f32| {
            // SAFETY: the feature was detected.
            let hard = unsafe { hard(a, b, c) };
            let soft = soft(a, b, c);
            assert!(hard.to_bits() == soft.to_bits() || (hard.is_nan() && soft.is_nan()), "{a:e} * {b:e} + {c:e}: {hard:e}, not {soft:e}");
        };
        let mut x = 7u64;
        let mut next = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 32) as u32
        };
        let special = [0, 1, 2, 0x7f_ffff, 0x80_0000, 0x3f80_0000, 0x3f80_0001, 0x3f7f_ffff, 0x7f7f_ffff, 0x7f80_0000, 0x7fc0_0000];
        let special: Vec<f32> = special.iter().flat_map(|&bits| [f32::from_bits(bits), f32::from_bits(bits | 1 << 31)]).collect();
        for &a in &special {
            for &b in &special {
                special.iter().for_each(|&c| check(a, b, c));
            }
        }
        for round in 0..1_000_000u32 {
            let a = f32::from_bits(next());
            let b = f32::from_bits(next());
            let c = f32::from_bits(next());
            check(a, b, c);
            // Numbers of like size: sums that cancel, and ties that only the last bits of the product break.
            let near = |bits: u32| f32::from_bits(bits & 0x807f_ffff | 0x3f80_0000);
            let a = near(a.to_bits());
            let b = near(b.to_bits());
            let scaled = f32::from_bits(c.to_bits() & 0x807f_ffff | (100 + round % 55) << 23);
            check(a, b, scaled);
            check(a, b, -(a * b));
            check(a, b, f32::from_bits((a * b).to_bits() ^ (round % 8) ^ 1 << 31));
            // Few bits in each factor make ties frequent.
            let coarse = |x: f32, keep: u32| f32::from_bits(x.to_bits() & !(0x7f_ffff >> keep));
            check(coarse(a, 1 + round % 13), coarse(b, 12), coarse(scaled, 1 + round % 23));
            // Results among the subnormal numbers.
            let small = f32::from_bits(a.to_bits() & 0x807f_ffff | (1 + round % 30) << 23);
            check(small, coarse(b, 12) * f32::from_bits((113 + round % 15) << 23), f32::from_bits(c.to_bits() & 0x80ff_ffff));
        }
    }
}
