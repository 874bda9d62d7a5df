//! A line with a predicate, then a blob of statistics: a Parquet file, or other bytes from which rows are made and encoded.
//! Rows that decode are the same after encoding and decoding them again, and the predicate says the same after it was shown
//! as text and parsed again.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::arbitrary::{Result as Made, Unstructured};
use libfuzzer_sys::fuzz_target;
use tensorcask::{
    ChangeStatistics, ChunkGrid, ChunkStatistics, Dtype, Predicate, Rect, TensorStatistics, ValueStatistics, decode_statistics,
    encode_statistics,
};
use tensorcask_fuzz::{ignore_panics_of_dependencies, small_limits};

fuzz_target!(init: ignore_panics_of_dependencies(), |data: &[u8]| {
    let end = data.iter().position(|&byte| byte == b'\n').unwrap_or(data.len());
    let text = &data[..end];
    let rest = data.get(end + 1..).unwrap_or_default();
    let predicates = std::str::from_utf8(text).ok().and_then(|text| Predicate::parse(text).ok()).map(|predicate| {
        let again = Predicate::parse(&predicate.to_string()).unwrap();
        assert_eq!(again.to_string(), predicate.to_string());
        (predicate, again)
    });
    let limits = small_limits();
    let (blob, made) = if rest.starts_with(b"PAR1") {
        (rest.to_vec(), None)
    } else {
        let Ok(rows) = rows(&mut Unstructured::new(rest)) else { return };
        (encode_statistics(&rows).unwrap(), Some(rows))
    };
    let Ok(rows) = decode_statistics(Bytes::from(blob), &limits) else { return };
    assert!(made.is_none_or(|made| made == rows));
    assert_eq!(decode_statistics(Bytes::from(encode_statistics(&rows).unwrap()), &limits).unwrap(), rows);
    for chunks in rows.chunk_by(|one, other| one.tensor == other.tensor) {
        let tensor = TensorStatistics::of(chunks).unwrap();
        if let Some((predicate, again)) = &predicates {
            assert_eq!(predicate.holds(&tensor), again.holds(&tensor));
        }
    }
});

/// Makes up to eight rows. Half of them have what a row has to have: a chunk of the shard, and its number of elements.
fn rows(input: &mut Unstructured<'_>) -> Made<Vec<ChunkStatistics>> {
    (0..input.int_in_range(0..=8)?).map(|number| row(number, input)).collect()
}

fn row(number: u8, input: &mut Unstructured<'_>) -> Made<ChunkStatistics> {
    let name = char::from(b'a' + number / 2);
    let dtype = Dtype::from_code(input.int_in_range(1..=25)?).unwrap();
    let shard = Rect { offset: input.arbitrary()?, shape: input.arbitrary()? };
    let mut chunk = u64::from(number % 2);
    let mut elements = input.arbitrary()?;
    if input.arbitrary()? {
        let grid = ChunkGrid::new(dtype, &shard.shape).ok().filter(|grid| grid.chunk_count() > 0);
        chunk = grid.as_ref().map_or(chunk, |grid| chunk.min(grid.chunk_count() - 1));
        elements = grid.map_or(elements, |grid| grid.elements(chunk).end - grid.elements(chunk).start);
    }
    let small = |input: &mut Unstructured<'_>| Ok(u64::from(input.arbitrary::<u8>()?));
    let values = match input.arbitrary()? {
        false => None,
        true => Some(ValueStatistics {
            nan: small(input)?,
            positive_infinity: small(input)?,
            negative_infinity: small(input)?,
            zero: small(input)?,
            subnormal: input.arbitrary()?,
            min: input.arbitrary()?,
            max: input.arbitrary()?,
            sum: input.arbitrary()?,
            squares: input.arbitrary()?,
            exponents: input.arbitrary()?,
        }),
    };
    let change = match input.arbitrary()? {
        false => None,
        true => Some(ChangeStatistics { changed: small(input)?, squares: input.arbitrary()?, ulps: input.arbitrary()? }),
    };
    let reference_step = if input.arbitrary()? { change.map(|_| 1) } else { input.arbitrary()? };
    Ok(ChunkStatistics { tensor: name.to_string(), role: "model".into(), dtype, shard, chunk, elements, values, change, reference_step })
}
