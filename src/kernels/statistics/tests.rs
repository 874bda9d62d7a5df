use super::{ChangeStatistics, LANES, ValueStatistics, changes_at, values, values_at};
use crate::Dtype;
use crate::kernels::Level;
use crate::kernels::float8::Float8;
use crate::kernels::floats::{odd_numbers, to_bytes};

const DTYPES: [Dtype; 9] =
    [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::F8E4M3, Dtype::F8E5M2, Dtype::F8E4M3Fnuz, Dtype::F8E5M2Fnuz, Dtype::F8E8M0];

/// Bytes of elements of all kinds, including the extremes.
fn odd_bytes(seed: u64, dtype: Dtype, count: usize) -> Vec<u8> {
    let mut bytes = to_bytes(&odd_numbers(seed, count * 2));
    if dtype == Dtype::F64 {
        // The upper half of the number decides about exponent and sign.
        bytes.chunks_mut(8).for_each(|number| number.reverse());
    }
    bytes.truncate(count * (dtype.bits() / 8) as usize);
    bytes
}

#[allow(clippy::little_endian_bytes, reason = "a test: elements are little-endian")]
fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let half = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    match dtype {
        Dtype::F16 => bytes.chunks(2).map(|unit| half::f16::from_bits(half(unit)).into()).collect(),
        Dtype::Bf16 => bytes.chunks(2).map(|unit| half::bf16::from_bits(half(unit)).into()).collect(),
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|unit| f32::from_le_bytes(*unit).into()).collect(),
        _ if let Some(all) = Float8::of(dtype) => bytes.iter().map(|&bits| all.value(bits)).collect(),
        _ => bytes.as_chunks::<8>().0.iter().map(|unit| f64::from_le_bytes(*unit)).collect(),
    }
}

/// The definition in the spec, element by element.
fn by_definition(dtype: Dtype, bytes: &[u8]) -> ValueStatistics {
    let least_normal = match dtype {
        Dtype::F16 => 2f64.powi(-14),
        Dtype::Bf16 | Dtype::F32 => f64::from(f32::MIN_POSITIVE),
        _ => Float8::of(dtype).map_or(f64::MIN_POSITIVE, Float8::least_normal),
    };
    let mut found = ValueStatistics::default();
    let mut sums = [0.0; LANES];
    let mut squares = [0.0; LANES];
    for (i, x) in numbers(dtype, bytes).into_iter().enumerate() {
        match x {
            _ if x.is_nan() => found.nan += 1,
            f64::INFINITY => found.positive_infinity += 1,
            f64::NEG_INFINITY => found.negative_infinity += 1,
            _ => {
                found.zero += u64::from(x == 0.0);
                found.subnormal += u64::from(x != 0.0 && x.abs() < least_normal);
                found.min = Some(found.min.map_or(x, |min| min.min(x)) + 0.0);
                found.max = Some(found.max.map_or(x, |max| max.max(x)) + 0.0);
                sums[i % LANES] += x;
                squares[i % LANES] += x * x;
                if i % 16 == 0 && x != 0.0 {
                    let range = (1..16).rev().find(|&range| x.abs() >= 2f64.powi(4 * range - 48)).unwrap_or(0);
                    found.exponents[range as usize] += 1;
                }
            }
        }
    }
    let total = |sums: [f64; LANES]| Some(sums.into_iter().fold(0.0, |a, b| a + b)).filter(|sum| sum.is_finite());
    (found.sum, found.squares) = (total(sums), total(squares));
    found
}

#[test]
fn statistics_are_those_of_the_definition_at_every_level() {
    for dtype in DTYPES {
        for (seed, count) in [(1, 0), (2, 1), (3, 7), (4, 8), (5, 511), (6, 512), (7, 513), (8, 5000)] {
            let mut bytes = odd_bytes(seed, dtype, count);
            let expected = by_definition(dtype, &bytes);
            let finite_blocks: Vec<u8> = {
                let width = (dtype.bits() / 8) as usize;
                bytes.chunks_mut(width).for_each(|unit| *unit.last_mut().unwrap() &= 0xbf);
                bytes
            };
            let expected_finite = by_definition(dtype, &finite_blocks);
            for level in Level::available() {
                let bytes = odd_bytes(seed, dtype, count);
                assert_eq!(values_at(level, dtype, &bytes), Some(expected), "{dtype} {count} {level:?}");
                assert_eq!(values_at(level, dtype, &finite_blocks), Some(expected_finite), "{dtype} {count} {level:?}");
            }
        }
    }
}

#[test]
fn normal_numbers_take_no_other_path() {
    // No zero, no subnormal number and nothing infinite, in whole blocks of either sign and of both.
    for dtype in DTYPES.into_iter().filter(|dtype| Float8::of(*dtype).is_none()) {
        let signs: [fn(usize) -> bool; 3] = [|_| false, |_| true, |i| i % 2 == 1];
        for (number, is_negative) in signs.into_iter().enumerate() {
            let width = (dtype.bits() / 8) as usize;
            let mut bytes = odd_bytes(9, dtype, 3000);
            for (i, unit) in bytes.chunks_mut(width).enumerate() {
                let top = unit.last_mut().unwrap();
                *top = (0x18 + (*top & 0x3f)) | u8::from(is_negative(i)) << 7;
            }
            let expected = by_definition(dtype, &bytes);
            assert_eq!((expected.zero, expected.subnormal, expected.nan, expected.positive_infinity), (0, 0, 0, 0), "{dtype}");
            for level in Level::available() {
                assert_eq!(values_at(level, dtype, &bytes), Some(expected), "{dtype} {level:?} {number}");
            }
        }
    }
}

#[test]
fn changes_are_those_of_the_definition_at_every_level() {
    for dtype in DTYPES {
        let before = odd_bytes(1, dtype, 1237);
        let mut after = odd_bytes(2, dtype, 1237);
        after[..64].copy_from_slice(&before[..64]);
        let width = (dtype.bits() / 8) as usize;
        let ordered = |unit: &[u8]| {
            let bits = unit.iter().rev().fold(0i128, |bits, &byte| bits << 8 | i128::from(byte));
            let sign = 1i128 << (dtype.bits() - 1);
            if bits & sign == 0 || dtype == Dtype::F8E8M0 { bits } else { sign - bits }
        };
        let mut changed = 0;
        let mut squares = [0.0; LANES];
        let mut ulps = 0;
        let pairs = numbers(dtype, &before).into_iter().zip(numbers(dtype, &after));
        for (i, ((x, y), (old, new))) in pairs.zip(before.chunks(width).zip(after.chunks(width))).enumerate() {
            changed += u64::from(old != new);
            if x.is_finite() && y.is_finite() {
                squares[i % LANES] += (y - x) * (y - x);
                ulps = ulps.max((ordered(old) - ordered(new)).unsigned_abs() as u64);
            }
        }
        let squares = Some(squares.into_iter().fold(0.0, |a, b| a + b)).filter(|sum: &f64| sum.is_finite());
        for level in Level::available() {
            let found = changes_at(level, dtype, &before, &after);
            assert_eq!(found, Some(ChangeStatistics { changed, squares, ulps }), "{dtype} {level:?}");
            let same = changes_at(level, dtype, &before, &before);
            assert_eq!(same, Some(ChangeStatistics { changed: 0, squares: Some(0.0), ulps: 0 }), "{dtype} {level:?}");
        }
    }
}

#[test]
fn vectors_of_the_spec_hold_at_every_level() {
    let vectors: toml::Table = toml::from_str(include_str!("../../../spec/vectors/statistics.toml")).unwrap();
    let tables = |name: &str| vectors[name].as_array().unwrap().iter().map(|table| table.as_table().unwrap());
    let dtype = |table: &toml::Table| Dtype::from_name(table["dtype"].as_str().unwrap()).unwrap();
    let data = |table: &toml::Table, key: &str| -> Vec<u8> {
        let digits = table[key].as_str().unwrap().as_bytes().as_chunks::<2>().0;
        digits.iter().map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    };
    let count = |table: &toml::Table, key: &str| table[key].as_integer().unwrap() as u64;
    let float =
        |table: &toml::Table, key: &str| table.get(key).map(|hex| f64::from_bits(u64::from_str_radix(hex.as_str().unwrap(), 16).unwrap()));
    for table in tables("values") {
        let expected = ValueStatistics {
            nan: count(table, "nan"),
            positive_infinity: count(table, "positive_infinity"),
            negative_infinity: count(table, "negative_infinity"),
            zero: count(table, "zero"),
            subnormal: count(table, "subnormal"),
            min: float(table, "min"),
            max: float(table, "max"),
            sum: float(table, "sum"),
            squares: float(table, "sum_squares"),
            exponents: table["exponents"].clone().try_into().unwrap(),
        };
        for level in Level::available() {
            // `Debug` shows the sign of a zero.
            let found = values_at(level, dtype(table), &data(table, "data"));
            assert_eq!(format!("{found:?}"), format!("{:?}", Some(expected)), "{level:?}, {table:?}");
        }
    }
    for table in tables("changes") {
        let squares = float(table, "change_squares");
        let ulps = table["change_ulps"].as_str().unwrap().parse().unwrap();
        let expected = ChangeStatistics { changed: count(table, "changed"), squares, ulps };
        for level in Level::available() {
            let found = changes_at(level, dtype(table), &data(table, "before"), &data(table, "after"));
            assert_eq!(found, Some(expected), "{level:?}, {table:?}");
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn the_environment_of_the_caller_does_not_count() {
    let bytes = odd_bytes(3, Dtype::F16, 3000);
    let expected = values(Dtype::F16, &bytes);
    crate::kernels::with_odd_environment(|| assert_eq!(values(Dtype::F16, &bytes), expected));
}

#[test]
fn chunks_add_up() {
    let bytes = odd_bytes(9, Dtype::Bf16, 4096);
    let (first, second) = bytes.split_at(4096);
    let whole = values(Dtype::Bf16, &bytes).unwrap();
    let added = values(Dtype::Bf16, first).unwrap().and(values(Dtype::Bf16, second).unwrap());
    assert_eq!(ValueStatistics { sum: None, squares: None, ..added }, ValueStatistics { sum: None, squares: None, ..whole });
    assert_eq!((ValueStatistics::first_exponent(0), ValueStatistics::first_exponent(1)), (None, Some(-44)));
    assert_eq!(values(Dtype::I32, &bytes), None);
    assert_eq!(values(Dtype::F4E2M1, &bytes), None);
}

#[test]
fn complex_numbers_are_measured_by_their_parts() {
    let before = odd_bytes(1, Dtype::F64, 400);
    let after = odd_bytes(2, Dtype::F64, 400);
    for (complex, part) in [(Dtype::C64, Dtype::F32), (Dtype::C128, Dtype::F64)] {
        assert_eq!(values(complex, &before), values(part, &before));
        assert_eq!(super::changes(complex, &before, &after), super::changes(part, &before, &after));
    }
}
