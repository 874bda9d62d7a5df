//! `tc.sparse`: the few floats that changed, by the base's exponent.
//!
//! Spec:   spec/codecs/sparse.md
//! Input:  n floats of width w (1, 2, 4 bytes) and n floats of the base
//! Output: one bit stream: of each exponent, which of its floats changed, and by how many representable numbers
//! Errors: `Corrupt` if the stream disagrees with the base and with n; `InvalidArgument` without a base
//! Cost:   one pass over the exponents to count them, one to find the changed floats, and work for each of these
//! Source: ours: an update is about as large for all weights, so the share of weights that it changes after rounding doubles from one
//!         exponent to the next smaller one. Golomb codes of ranks: Rice, "Some Practical Universal Noiseless Coding Techniques", 1979

use tensorcask_kernels::bits::{BitAppender, BitReader};
use tensorcask_kernels::mask;
use tensorcask_kernels::ordered;
use tensorcask_kernels::spare::Spare;
use tensorcask_kernels::sparse::{Change, Units};

use super::ordered::exponent_of;
use super::{BaseUse, Chunk, Codec, Columns, Cost, Encoded, sample};
use crate::{Dtype, Error, Result};

/// Stores the few elements that changed since the parent snapshot, in about a byte each.
///
/// ```
/// use tensorcask::{Dtype, codec::{Chunk, Codec, Sparse}};
/// let base: Vec<u8> = (0..10_000).flat_map(|i| (0.5f32 + i as f32 * 1e-5).to_le_bytes()).collect();
/// let mut data = base.clone();
/// for changed in data.chunks_mut(4).step_by(100) {
///     changed[0] ^= 1;
/// }
/// let chunk = Chunk { base: Some(&base), ..Chunk::new(Dtype::F32, 10_000, &data) };
/// let bytes: usize = Sparse.encode(&chunk)?.columns.iter().map(|(_, bytes)| bytes.len()).sum();
/// assert!(bytes < 150);
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Sparse;

const COLUMN: &str = "changes";
/// Greatest number of bits of [`Stream::put`].
const MOST_BITS: u32 = 48;
/// Bits of the order of distant changes.
const ORDER_BITS: u32 = 5;

fn exponent_for(dtype: Dtype) -> Result<ordered::Exponent> {
    exponent_of(dtype).ok_or_else(|| corrupt("sparse 1", format!("chunks of {dtype}")))
}

fn units_of(dtype: Dtype, base: &[u8]) -> Result<Units> {
    let width = dtype.unit_bytes();
    let exponent = exponent_for(dtype)?;
    let mut found = Spare::new(base.len() / width, "exponents")?;
    ordered::exponents(width, exponent, base, &mut found);
    Ok(Units::new(found))
}

/// The number of low bits in the code of a gap between members, of which there are `members` among `units` (sparse 3.2).
fn low_bits(units: u32, members: u32) -> u32 {
    let units = u64::from(units);
    let members = u64::from(members);
    (2 * units - members).checked_div(2 * members).and_then(u64::checked_ilog2).unwrap_or(0)
}

/// A bit stream, and how many of its bits are counts and orders, which hardly grow with the chunk.
#[derive(Default)]
struct Stream {
    bits: BitAppender,
    length: u64,
    counts: u64,
}

impl Stream {
    fn put(&mut self, bits: u64, count: u32) {
        self.bits.reserve(MOST_BITS as usize, 64);
        self.bits.put(bits, count);
        self.length += u64::from(count);
    }

    /// So many bits 1, and a bit 0.
    fn put_unary(&mut self, mut count: u64) {
        while count >= u64::from(MOST_BITS) {
            self.put((1 << MOST_BITS) - 1, MOST_BITS);
            count -= u64::from(MOST_BITS);
        }
        self.put((1 << count) - 1, count as u32 + 1);
    }

    /// A number of any size (sparse 3).
    fn put_number(&mut self, number: u64) {
        let more = number.saturating_add(1);
        let length = more.ilog2();
        self.put_unary(u64::from(length));
        self.put(more - (1 << length), length);
    }

    fn put_count(&mut self, put: impl FnOnce(&mut Self)) {
        let before = self.length;
        put(self);
        self.counts += self.length - before;
    }

    /// The places of members among so many units (sparse 3.1).
    fn put_places(&mut self, units: u32, members: &[u32]) {
        let count = members.len() as u32;
        if count == 0 || count == units {
            return;
        }
        if 2 * u64::from(count) > u64::from(units) {
            let mut next = members.iter().copied().peekable();
            let others: Vec<u32> = (0..units).filter(|unit| next.next_if_eq(unit).is_none()).collect();
            return self.put_places(units, &others);
        }
        let low = low_bits(units, count);
        let mut from = 0;
        for &member in members {
            let gap = u64::from(member - from);
            self.put_unary(gap >> low);
            self.put(gap & ((1 << low) - 1), low);
            from = member + 1;
        }
    }

    /// The changes of one exponent (sparse 2).
    fn put_group(&mut self, units: u32, changes: &[Change]) {
        self.put_count(|stream| stream.put_number(changes.len() as u64));
        if changes.is_empty() {
            return;
        }
        self.put_places(units, &changes.iter().map(|change| change.rank).collect::<Vec<u32>>());
        for change in changes {
            self.put(u64::from(change.difference < 0), 1);
        }
        let is_distant = |change: &&Change| change.difference.unsigned_abs() >= 2;
        let beyond: Vec<u64> = changes.iter().filter(is_distant).map(|change| change.difference.unsigned_abs() - 2).collect();
        self.put_count(|stream| stream.put_number(beyond.len() as u64));
        if beyond.is_empty() {
            return;
        }
        let distant: Vec<u32> = (0..).zip(changes).filter(|(_, change)| is_distant(change)).map(|(at, _)| at).collect();
        self.put_places(changes.len() as u32, &distant);
        let order = best_order(&beyond);
        self.put_count(|stream| stream.put(u64::from(order), ORDER_BITS));
        for number in beyond {
            self.put_number(number >> order);
            self.put(number & ((1 << order) - 1), order);
        }
    }
}

/// The order with which these numbers take the fewest bits.
fn best_order(numbers: &[u64]) -> u32 {
    let bits = |order: u32| -> u64 { numbers.iter().map(|number| 2 * u64::from(((number >> order) + 1).ilog2()) + u64::from(order)).sum() };
    // With more, all that is left of a number is 0.
    let most = numbers.iter().max().and_then(|most| most.checked_ilog2()).map_or(0, |highest| highest + 1);
    (0..=most.min((1 << ORDER_BITS) - 1)).min_by_key(|order| bits(*order)).unwrap_or(0)
}

fn write(dtype: Dtype, base: &[u8], data: &[u8]) -> Result<Stream> {
    let of_base = units_of(dtype, base)?;
    let changes = of_base.changes(dtype.unit_bytes(), base, data);
    let mut stream = Stream::default();
    for (&units, changes) in of_base.totals().iter().zip(&changes).filter(|(units, _)| **units > 0) {
        stream.put_group(units, changes);
    }
    Ok(stream)
}

/// Reads what [`Stream`] writes. Past the end of the bytes it finds zeros.
struct Reader<'a>(BitReader<'a>);

impl Reader<'_> {
    fn take(&mut self, count: u32) -> u64 {
        let bits = self.0.peek() & ((1 << count) - 1);
        self.0.skip(count);
        bits
    }

    fn unary(&mut self) -> u64 {
        let mut sum = 0;
        loop {
            let ones = self.0.peek().trailing_ones().min(MOST_BITS);
            sum += u64::from(ones);
            if ones < MOST_BITS {
                self.0.skip(ones + 1);
                return sum;
            }
            self.0.skip(ones);
        }
    }

    fn number(&mut self) -> Result<u64> {
        let length = self.unary();
        match length {
            0..=32 => Ok((1 << length) - 1 + self.take(length as u32)),
            _ => Err(corrupt("sparse 3", format!("a number of {length} bits"))),
        }
    }

    /// A number that is at most `most`.
    fn count(&mut self, most: usize, what: &str) -> Result<usize> {
        let count = self.number()?;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(corrupt("sparse 2.1", format!("{count} {what} of {most}"))),
        }
    }

    fn places(&mut self, units: u32, count: u32) -> Result<Vec<u32>> {
        if count == units {
            return Ok((0..units).collect());
        }
        if 2 * u64::from(count) > u64::from(units) {
            let mut others = self.places(units, units - count)?.into_iter().peekable();
            return Ok((0..units).filter(|unit| others.next_if_eq(unit).is_none()).collect());
        }
        let low = low_bits(units, count);
        let mut from = 0u64;
        let mut places = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let gap = self.unary().saturating_mul(1 << low).saturating_add(self.take(low));
            let place = from.saturating_add(gap);
            if place >= u64::from(units) {
                return Err(corrupt("sparse 3.2", format!("a change of unit {place} of {units}")));
            }
            places.push(place as u32);
            from = place + 1;
        }
        Ok(places)
    }

    fn group(&mut self, dtype: Dtype, units: u32) -> Result<Vec<Change>> {
        let count = self.count(units as usize, "changed units")?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let ranks = self.places(units, count as u32)?;
        let mut changes: Vec<Change> = ranks.into_iter().map(|rank| Change { rank, difference: 1 }).collect();
        for change in &mut changes {
            change.difference -= 2 * self.take(1) as i64;
        }
        let distant = self.count(count, "distant changes")?;
        if distant == 0 {
            return Ok(changes);
        }
        let distant = self.places(count as u32, distant as u32)?;
        let order = self.take(ORDER_BITS) as u32;
        if order >= 8 * dtype.unit_bytes() as u32 {
            return Err(corrupt("sparse 2.2", format!("the order {order}")));
        }
        let half = 1i64 << (8 * dtype.unit_bytes() - 1);
        for at in distant {
            let beyond = (self.number()? << order) + self.take(order) + 2;
            let Some(change) = changes.get_mut(at as usize) else { continue };
            change.difference *= i64::try_from(beyond).unwrap_or(i64::MAX);
            if change.difference < -half || change.difference >= half {
                return Err(corrupt("sparse 2.3", format!("a difference of {}", change.difference)));
            }
        }
        Ok(changes)
    }
}

fn corrupt(clause: &'static str, message: String) -> Error {
    Error::corrupt(message).clause(clause)
}

impl Codec for Sparse {
    fn id(&self) -> &str {
        "tc.sparse"
    }

    fn supports(&self, dtype: Dtype, _: &str) -> bool {
        exponent_of(dtype).is_some()
    }

    fn base_use(&self) -> BaseUse {
        BaseUse::Always
    }

    fn cost(&self) -> Cost {
        Cost { encode: 10.0, decode: 10.0 }
    }

    fn max_encoded_bytes(&self, dtype: Dtype, element_count: u64) -> u64 {
        // Twice two bits for the places, one for the sign, two for each bit of the difference; of each exponent two counts and an order.
        let bits = dtype.byte_count(element_count).unwrap_or(u64::MAX / 64).saturating_mul(8);
        let units = bits / (8 * dtype.unit_bytes() as u64);
        bits.saturating_mul(2).saturating_add(units.saturating_mul(6)) / 8 + 256 * 17 + 1
    }

    fn estimate(&self, chunk: &Chunk<'_>) -> Option<Vec<u64>> {
        exponent_of(chunk.dtype)?;
        let base = chunk.whole_base()?;
        let width = chunk.dtype.unit_bytes();
        let base = sample(base, width);
        let data = sample(chunk.data, width);
        if 2 * mask::count_changed(width, &base, &data) > data.len() / width {
            // Another codec is better, and a long list takes time.
            return Some(vec![self.max_encoded_bytes(chunk.dtype, chunk.element_count)]);
        }
        let Stream { length, counts, .. } = write(chunk.dtype, &base, &data).ok()?;
        if data.len() == chunk.data.len() {
            return Some(vec![length.div_ceil(8)]);
        }
        let others = (length - counts).saturating_mul(chunk.data.len() as u64) / data.len().max(1) as u64;
        Some(vec![(others + 4 * counts) / 8])
    }

    fn encode(&self, chunk: &Chunk<'_>) -> Result<Encoded> {
        let base = chunk.whole_base().ok_or_else(|| Error::invalid("needs a base chunk of equal length"))?;
        if exponent_of(chunk.dtype).is_none() {
            return Err(Error::invalid(format!("cannot store {}", chunk.dtype)));
        }
        let changes = write(chunk.dtype, base, chunk.data)?.bits.finish();
        Ok(Encoded { uses_base: true, columns: vec![(COLUMN, changes)] })
    }

    fn check_columns(&self, dtype: Dtype, names: &[&str]) -> Result<()> {
        exponent_for(dtype)?;
        super::are_columns(names.iter().copied(), &[COLUMN])
    }

    fn decode(&self, columns: &Columns<'_>, out: &mut [u8]) -> Result<()> {
        let [stream] = columns.exactly([COLUMN])?;
        let base = columns.base(out.len())?;
        let of_base = units_of(columns.dtype, base)?;
        let counts = of_base.totals();
        let mut reader = Reader(BitReader::new(stream));
        let mut changes = Vec::with_capacity(counts.len());
        for &units in counts {
            changes.push(if units > 0 { reader.group(columns.dtype, units)? } else { Vec::new() });
        }
        if !reader.0.is_at_end() {
            return Err(corrupt("sparse 3.3", format!("{} bytes that do not end with the last group", stream.len())));
        }
        out.copy_from_slice(base);
        of_base.apply(columns.dtype.unit_bytes(), &changes, out);
        Ok(())
    }
}
