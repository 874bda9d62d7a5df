use super::{ChangeStatistics, LANES, ValueStatistics, changes_at, values, values_at};
use crate::float8::Float8;
use crate::floats::{odd_numbers, to_bytes};
use crate::{Float8Format, Level, NumberFormat};

const FORMATS: [NumberFormat; 9] = [
    NumberFormat::F16,
    NumberFormat::Bf16,
    NumberFormat::F32,
    NumberFormat::F64,
    NumberFormat::F8(Float8Format::E4M3),
    NumberFormat::F8(Float8Format::E5M2),
    NumberFormat::F8(Float8Format::E4M3Fnuz),
    NumberFormat::F8(Float8Format::E5M2Fnuz),
    NumberFormat::F8(Float8Format::E8M0),
];

/// Bytes of a number.
fn width_of(format: NumberFormat) -> usize {
    match format {
        NumberFormat::F16 | NumberFormat::Bf16 => 2,
        NumberFormat::F32 => 4,
        NumberFormat::F64 => 8,
        NumberFormat::F8(_) => 1,
    }
}

/// Format of the numbers in elements of a dtype of the spec. The two parts of a complex number are measured one after the other.
fn format_of(dtype: &str) -> NumberFormat {
    match dtype {
        "f16" => NumberFormat::F16,
        "bf16" => NumberFormat::Bf16,
        "f32" | "c64" => NumberFormat::F32,
        "f64" | "c128" => NumberFormat::F64,
        "f8_e4m3" => NumberFormat::F8(Float8Format::E4M3),
        "f8_e5m2" => NumberFormat::F8(Float8Format::E5M2),
        "f8_e4m3fnuz" => NumberFormat::F8(Float8Format::E4M3Fnuz),
        "f8_e5m2fnuz" => NumberFormat::F8(Float8Format::E5M2Fnuz),
        "f8_e8m0" => NumberFormat::F8(Float8Format::E8M0),
        other => panic!("{other}"),
    }
}

/// Bytes of elements of all kinds, including the extremes.
fn odd_bytes(seed: u64, format: NumberFormat, count: usize) -> Vec<u8> {
    let mut bytes = to_bytes(&odd_numbers(seed, count * 2));
    if format == NumberFormat::F64 {
        // The upper half of the number decides about exponent and sign.
        bytes.chunks_mut(8).for_each(|number| number.reverse());
    }
    bytes.truncate(count * width_of(format));
    bytes
}

#[allow(clippy::little_endian_bytes, reason = "a test: elements are little-endian")]
fn numbers(format: NumberFormat, bytes: &[u8]) -> Vec<f64> {
    let half = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    match format {
        NumberFormat::F16 => bytes.chunks(2).map(|unit| half::f16::from_bits(half(unit)).into()).collect(),
        NumberFormat::Bf16 => bytes.chunks(2).map(|unit| half::bf16::from_bits(half(unit)).into()).collect(),
        NumberFormat::F32 => bytes.as_chunks::<4>().0.iter().map(|unit| f32::from_le_bytes(*unit).into()).collect(),
        NumberFormat::F8(format) => bytes.iter().map(|&bits| Float8::of(format).value(bits)).collect(),
        NumberFormat::F64 => bytes.as_chunks::<8>().0.iter().map(|unit| f64::from_le_bytes(*unit)).collect(),
    }
}

/// The definition in the spec, element by element.
fn by_definition(format: NumberFormat, bytes: &[u8]) -> ValueStatistics {
    let least_normal = match format {
        NumberFormat::F16 => 2f64.powi(-14),
        NumberFormat::Bf16 | NumberFormat::F32 => f64::from(f32::MIN_POSITIVE),
        NumberFormat::F64 => f64::MIN_POSITIVE,
        NumberFormat::F8(format) => Float8::of(format).least_normal(),
    };
    let mut found = ValueStatistics::default();
    let mut sums = [0.0; LANES];
    let mut squares = [0.0; LANES];
    for (i, x) in numbers(format, bytes).into_iter().enumerate() {
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
    for format in FORMATS {
        for (seed, count) in [(1, 0), (2, 1), (3, 7), (4, 8), (5, 511), (6, 512), (7, 513), (8, 5000)] {
            let mut bytes = odd_bytes(seed, format, count);
            let expected = by_definition(format, &bytes);
            let finite_blocks: Vec<u8> = {
                let width = width_of(format);
                bytes.chunks_mut(width).for_each(|unit| *unit.last_mut().unwrap() &= 0xbf);
                bytes
            };
            let expected_finite = by_definition(format, &finite_blocks);
            for level in Level::available() {
                let bytes = odd_bytes(seed, format, count);
                assert_eq!(values_at(level, format, &bytes), expected, "{format:?} {count} {level:?}");
                assert_eq!(values_at(level, format, &finite_blocks), expected_finite, "{format:?} {count} {level:?}");
            }
        }
    }
}

#[test]
fn normal_numbers_take_no_other_path() {
    // No zero, no subnormal number and nothing infinite, in whole blocks of either sign and of both.
    for format in FORMATS.into_iter().filter(|format| width_of(*format) > 1) {
        let signs: [fn(usize) -> bool; 3] = [|_| false, |_| true, |i| i % 2 == 1];
        for (number, is_negative) in signs.into_iter().enumerate() {
            let width = width_of(format);
            let mut bytes = odd_bytes(9, format, 3000);
            for (i, unit) in bytes.chunks_mut(width).enumerate() {
                let top = unit.last_mut().unwrap();
                *top = (0x18 + (*top & 0x3f)) | u8::from(is_negative(i)) << 7;
            }
            let expected = by_definition(format, &bytes);
            assert_eq!((expected.zero, expected.subnormal, expected.nan, expected.positive_infinity), (0, 0, 0, 0), "{format:?}");
            for level in Level::available() {
                assert_eq!(values_at(level, format, &bytes), expected, "{format:?} {level:?} {number}");
            }
        }
    }
}

#[test]
fn changes_are_those_of_the_definition_at_every_level() {
    for format in FORMATS {
        let before = odd_bytes(1, format, 1237);
        let mut after = odd_bytes(2, format, 1237);
        after[..64].copy_from_slice(&before[..64]);
        let width = width_of(format);
        let ordered = |unit: &[u8]| {
            let bits = unit.iter().rev().fold(0i128, |bits, &byte| bits << 8 | i128::from(byte));
            let sign = 1i128 << (8 * width - 1);
            if bits & sign == 0 || format == NumberFormat::F8(Float8Format::E8M0) { bits } else { sign - bits }
        };
        let mut changed = 0;
        let mut squares = [0.0; LANES];
        let mut ulps = 0;
        let pairs = numbers(format, &before).into_iter().zip(numbers(format, &after));
        for (i, ((x, y), (old, new))) in pairs.zip(before.chunks(width).zip(after.chunks(width))).enumerate() {
            changed += u64::from(old != new);
            if x.is_finite() && y.is_finite() {
                squares[i % LANES] += (y - x) * (y - x);
                ulps = ulps.max((ordered(old) - ordered(new)).unsigned_abs() as u64);
            }
        }
        let squares = Some(squares.into_iter().fold(0.0, |a, b| a + b)).filter(|sum: &f64| sum.is_finite());
        for level in Level::available() {
            let found = changes_at(level, format, &before, &after);
            assert_eq!(found, ChangeStatistics { changed, squares, ulps }, "{format:?} {level:?}");
            let same = changes_at(level, format, &before, &before);
            assert_eq!(same, ChangeStatistics { changed: 0, squares: Some(0.0), ulps: 0 }, "{format:?} {level:?}");
        }
    }
}

#[test]
fn vectors_of_the_spec_hold_at_every_level() {
    let vectors: toml::Table = toml::from_str(include_str!("../../../spec/vectors/statistics.toml")).unwrap();
    let tables = |name: &str| vectors[name].as_array().unwrap().iter().map(|table| table.as_table().unwrap());
    let format = |table: &toml::Table| format_of(table["dtype"].as_str().unwrap());
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
            let found = values_at(level, format(table), &data(table, "data"));
            assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{level:?}, {table:?}");
        }
    }
    for table in tables("changes") {
        let squares = float(table, "change_squares");
        let ulps = table["change_ulps"].as_str().unwrap().parse().unwrap();
        let expected = ChangeStatistics { changed: count(table, "changed"), squares, ulps };
        for level in Level::available() {
            let found = changes_at(level, format(table), &data(table, "before"), &data(table, "after"));
            assert_eq!(found, expected, "{level:?}, {table:?}");
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn the_environment_of_the_caller_does_not_count() {
    let bytes = odd_bytes(3, NumberFormat::F16, 3000);
    let expected = values(NumberFormat::F16, &bytes);
    crate::with_odd_environment(|| assert_eq!(values(NumberFormat::F16, &bytes), expected));
}

#[test]
fn chunks_add_up() {
    let bytes = odd_bytes(9, NumberFormat::Bf16, 4096);
    let (first, second) = bytes.split_at(4096);
    let whole = values(NumberFormat::Bf16, &bytes);
    let added = values(NumberFormat::Bf16, first).and(values(NumberFormat::Bf16, second));
    assert_eq!(ValueStatistics { sum: None, squares: None, ..added }, ValueStatistics { sum: None, squares: None, ..whole });
    assert_eq!((ValueStatistics::first_exponent(0), ValueStatistics::first_exponent(1)), (None, Some(-44)));
}
