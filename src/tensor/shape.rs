//! Shapes, rectangles, slices, and the runs of elements that a slice takes from a rectangle.

use std::collections::HashMap;
use std::ops::Range;

use crate::{Error, Result};

/// Returns the number of elements of a shape, or `None` beyond u64. An empty shape is a scalar: one element.
pub(crate) fn element_count(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent))
}

/// Formats a shape, such as `[4096, 256]`.
pub(crate) fn format_shape(shape: &[u64]) -> String {
    format!("{shape:?}")
}

/// Hyper-rectangle of a tensor: the place of a shard, or the part that a slice selects.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rect {
    /// First index in each dimension.
    pub offset: Vec<u64>,
    /// Extent in each dimension.
    pub shape: Vec<u64>,
}

impl Rect {
    /// Returns the rectangle that covers a whole tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self { offset: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// Returns the number of elements, or `None` beyond u64.
    pub fn element_count(&self) -> Option<u64> {
        element_count(&self.shape)
    }

    /// Returns whether the rectangle lies inside a tensor of `shape`.
    pub fn fits(&self, shape: &[u64]) -> bool {
        self.offset.len() == shape.len()
            && self.shape.len() == shape.len()
            && self
                .offset
                .iter()
                .zip(&self.shape)
                .zip(shape)
                .all(|((&offset, &extent), &global)| offset.checked_add(extent).is_some_and(|end| end <= global))
    }

    /// Returns the common part, or `None` if there is no common element. Both rectangles must have the same number of
    /// dimensions.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let mut rect = Self { offset: Vec::with_capacity(self.offset.len()), shape: Vec::with_capacity(self.offset.len()) };
        for dimension in 0..self.offset.len() {
            let start = self.offset[dimension].max(other.offset[dimension]);
            let end = (self.offset[dimension] + self.shape[dimension]).min(other.offset[dimension] + other.shape[dimension]);
            if start >= end {
                return None;
            }
            rect.offset.push(start);
            rect.shape.push(end - start);
        }
        Some(rect)
    }
}

/// Part of a tensor to read: a range for each leading dimension. All further dimensions are read whole.
///
/// ```
/// use tensorcask::Slice;
/// let rect = Slice::rows(10..20).of(&[100, 8])?;
/// assert_eq!((rect.offset, rect.shape), (vec![10, 0], vec![10, 8]));
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slice {
    ranges: Vec<Range<u64>>,
}

impl Slice {
    /// Selects the whole tensor.
    pub fn all() -> Self {
        Self::default()
    }

    /// Selects rows `range` of the first dimension.
    pub fn rows(range: Range<u64>) -> Self {
        Self { ranges: vec![range] }
    }

    /// Selects a range in each leading dimension.
    pub fn ranges(ranges: impl Into<Vec<Range<u64>>>) -> Self {
        Self { ranges: ranges.into() }
    }

    /// Returns the rectangle that this slice selects from a tensor of `shape`. A slice that reaches outside is an
    /// error.
    pub fn of(&self, shape: &[u64]) -> Result<Rect> {
        if self.ranges.len() > shape.len() {
            return Err(Error::invalid(format!("a slice of {} dimensions does not fit shape {}", self.ranges.len(), format_shape(shape))));
        }
        let mut rect = Rect::whole(shape);
        for (dimension, range) in self.ranges.iter().enumerate() {
            if range.start > range.end || range.end > shape[dimension] {
                return Err(Error::invalid(format!(
                    "slice {}..{} of dimension {dimension} does not fit shape {}",
                    range.start,
                    range.end,
                    format_shape(shape)
                )));
            }
            rect.offset[dimension] = range.start;
            rect.shape[dimension] = range.end - range.start;
        }
        Ok(rect)
    }
}

/// Run of elements that are adjacent both in a source rectangle and in a destination rectangle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Row-major element index in the source.
    pub source: u64,
    /// Row-major element index in the destination.
    pub destination: u64,
    /// Number of elements.
    pub count: u64,
}

/// Returns the range from the first to the last common element, row-major in `source`.
pub(crate) fn element_span(source: &Rect, other: &Rect) -> Range<u64> {
    let Some(common) = source.intersection(other) else { return 0..0 };
    let mut first = 0;
    let mut last = 0;
    for (dimension, stride) in strides(&source.shape).into_iter().enumerate() {
        let start = common.offset[dimension] - source.offset[dimension];
        first += start * stride;
        last += (start + common.shape[dimension] - 1) * stride;
    }
    first..last + 1
}

/// Returns the runs that copy elements `window` (row-major in `source`) into `destination`, in source order.
///
/// Both rectangles lie in one tensor; elements outside their intersection are skipped. Dimensions that both rectangles
/// cover whole are merged, so a whole tensor is one run.
pub(crate) fn contiguous_runs<'a>(source: &'a Rect, destination: &'a Rect, window: Range<u64>) -> impl Iterator<Item = Run> + 'a {
    let common = source.intersection(destination);
    let dimensions = source.shape.len();
    // Trailing dimensions form one run if source, destination and common part agree in them.
    let mut inner = dimensions;
    if let Some(common) = &common {
        while inner > 0 && common.shape[inner - 1] == source.shape[inner - 1] && common.shape[inner - 1] == destination.shape[inner - 1] {
            inner -= 1;
        }
    }
    // One more dimension varies within a run.
    let split = inner.saturating_sub(1);
    let (run_length, row_count) = match &common {
        None => (0, 0),
        Some(common) => (common.shape[split..].iter().product::<u64>(), common.shape[..split].iter().product::<u64>()),
    };
    let source_strides = strides(&source.shape);
    let destination_strides = strides(&destination.shape);
    let index_of = move |row: u64| -> Option<(u64, u64)> {
        let common = common.as_ref()?;
        let mut rest = row;
        let mut from = 0u64;
        let mut to = 0u64;
        for dimension in (0..dimensions).rev() {
            let local = if dimension < split {
                let local = rest % common.shape[dimension];
                rest /= common.shape[dimension];
                local
            } else {
                0
            };
            let index = common.offset[dimension] + local;
            from += (index - source.offset[dimension]) * source_strides[dimension];
            to += (index - destination.offset[dimension]) * destination_strides[dimension];
        }
        Some((from, to))
    };
    // Rows are ordered by source position, so skip to the first row that can reach the window.
    let first = partition_point(row_count, |row| index_of(row).is_some_and(|(from, _)| from + run_length <= window.start));
    (first..row_count).map_while(move |row| {
        let (from, to) = index_of(row)?;
        let start = from.max(window.start);
        let end = (from + run_length).min(window.end);
        (start < end).then(|| Run { source: start, destination: to + (start - from), count: end - start })
    })
}

/// Splits elements `window` (row-major) of a tensor into consecutive rectangles, each of which is one run. No dimension
/// may have extent 0.
pub(crate) fn rects_of_run(shape: &[u64], window: Range<u64>) -> Vec<Rect> {
    let strides = strides(shape);
    let mut rects = Vec::new();
    let mut at = window.start;
    while at < window.end {
        let fits = |&dimension: &usize| at.is_multiple_of(strides[dimension]) && window.end - at >= strides[dimension];
        let mut rect = Rect::whole(shape);
        let mut rest = at;
        for (offset, &stride) in rect.offset.iter_mut().zip(&strides) {
            *offset = rest / stride;
            rest %= stride;
        }
        // No dimension fits a scalar, which is one element.
        let Some(dimension) = (0..shape.len()).find(fits) else {
            rects.push(rect);
            break;
        };
        rect.shape[..dimension].fill(1);
        rect.shape[dimension] = ((window.end - at) / strides[dimension]).min(shape[dimension] - rect.offset[dimension]);
        at += rect.shape[dimension] * strides[dimension];
        rects.push(rect);
    }
    rects
}

/// Returns whether rectangles cover a tensor of `shape` with each element in exactly one rectangle. An empty tensor is
/// covered by its one whole rectangle.
///
/// The check adds +1 or -1 at each corner of every rectangle (the mixed difference of its indicator function). The
/// rectangles tile the tensor exactly if only the corners of the whole tensor remain.
pub(crate) fn tiles(shape: &[u64], rects: &[Rect]) -> Result<bool> {
    let whole = Rect::whole(shape);
    if element_count(shape) == Some(0) || rects.len() == 1 {
        return Ok(rects == [whole]);
    }
    if rects.iter().any(|rect| !rect.fits(shape) || rect.element_count() == Some(0)) {
        return Ok(false);
    }
    let split: Vec<usize> = (0..shape.len()).filter(|&d| rects.iter().any(|rect| rect.shape[d] != shape[d])).collect();
    if split.len() > MAX_SPLIT_DIMENSIONS {
        return Err(Error::unsupported(format!(
            "shards that split {} dimensions; at most {MAX_SPLIT_DIMENSIONS} are supported",
            split.len()
        )));
    }
    if rects.len().saturating_mul(1 << split.len()) > MAX_CORNERS {
        return Err(Error::unsupported(format!("{} shards that split {} dimensions are too many to check", rects.len(), split.len())));
    }
    let mut corners: HashMap<Vec<u64>, i64> = HashMap::new();
    let mut add = |rect: &Rect, sign: i64| {
        for upper in 0u32..1 << split.len() {
            let corner =
                split.iter().enumerate().map(|(i, &d)| rect.offset[d] + if upper >> i & 1 == 1 { rect.shape[d] } else { 0 }).collect();
            *corners.entry(corner).or_default() += if upper.count_ones() % 2 == 0 { sign } else { -sign };
        }
    };
    rects.iter().for_each(|rect| add(rect, 1));
    add(&whole, -1);
    Ok(corners.values().all(|&weight| weight == 0))
}

const MAX_SPLIT_DIMENSIONS: usize = 8;
/// Bounds the memory of the check. Allows a million shards that split two dimensions.
const MAX_CORNERS: usize = 1 << 22;

fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1u64; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension].saturating_mul(shape[dimension]);
    }
    strides
}

fn partition_point(count: u64, before: impl Fn(u64) -> bool) -> u64 {
    let mut low = 0;
    let mut high = count;
    while low < high {
        let middle = low + (high - low) / 2;
        if before(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(source: &Rect, destination: &Rect, chunk: u64) -> Vec<i64> {
        let total = source.element_count().unwrap_or(0);
        let mut out = vec![-1; destination.element_count().unwrap_or(0) as usize];
        let mut start = 0;
        while start < total {
            for run in contiguous_runs(source, destination, start..(start + chunk).min(total)) {
                for i in 0..run.count {
                    out[(run.destination + i) as usize] = (run.source + i) as i64;
                }
            }
            start += chunk;
        }
        out
    }

    #[test]
    fn a_run_is_cut_into_few_rectangles_in_order() {
        for shape in [vec![], vec![7], vec![3, 4], vec![2, 3, 4, 5]] {
            let count = element_count(&shape).unwrap_or(0);
            let whole = Rect::whole(&shape);
            for (start, end) in (0..=count).flat_map(|start| (start..=count).map(move |end| (start, end))) {
                let rects = rects_of_run(&shape, start..end);
                assert!(rects.len() < 2 * shape.len().max(1), "{shape:?}, {start}..{end}: {rects:?}");
                let mut at = start;
                for rect in &rects {
                    assert!(rect.fits(&shape));
                    let length = rect.element_count().unwrap_or(0);
                    assert!(length > 0);
                    let runs: Vec<Run> = contiguous_runs(&whole, rect, 0..count).collect();
                    assert!(runs.iter().all(|run| run.source == at + run.destination), "{shape:?}, {start}..{end}: {rects:?}");
                    assert_eq!(runs.iter().map(|run| run.count).sum::<u64>(), length);
                    at += length;
                }
                assert_eq!(at, end.max(start));
            }
        }
    }

    #[test]
    fn runs_copy_exactly_the_common_elements() {
        // The source covers [1..4, 2..6, 0..3] of a tensor, the destinations [2..5, 0..4, 0..3] and [2..5, 0..4, 1..2].
        let source = Rect { offset: vec![1, 2, 0], shape: vec![3, 4, 3] };
        for destination in [
            Rect { offset: vec![2, 0, 0], shape: vec![3, 4, 3] },
            Rect { offset: vec![2, 0, 1], shape: vec![3, 4, 1] },
            Rect { offset: vec![1, 2, 0], shape: vec![3, 4, 3] },
        ] {
            for chunk in [1, 2, 5, 12, 36] {
                let out = copy(&source, &destination, chunk);
                let mut expected = Vec::new();
                for a in 0..destination.shape[0] {
                    for b in 0..destination.shape[1] {
                        for c in 0..destination.shape[2] {
                            let index = [destination.offset[0] + a, destination.offset[1] + b, destination.offset[2] + c];
                            let inside = (0..3).all(|d| index[d] >= source.offset[d] && index[d] < source.offset[d] + source.shape[d]);
                            expected.push(if inside { (((index[0] - 1) * 4 + (index[1] - 2)) * 3 + index[2]) as i64 } else { -1 });
                        }
                    }
                }
                assert_eq!(out, expected, "chunk {chunk}");
                let copied = || expected.iter().copied().filter(|&index| index >= 0);
                let span = element_span(&source, &destination);
                assert_eq!((copied().min(), copied().max()), (Some(span.start as i64), Some(span.end as i64 - 1)));
            }
        }
    }

    #[test]
    fn whole_tensors_and_scalars_are_one_run() {
        let whole = Rect::whole(&[5, 7]);
        let runs: Vec<Run> = contiguous_runs(&whole, &whole, 0..35).collect();
        assert_eq!(runs, [Run { source: 0, destination: 0, count: 35 }]);
        let rows = Rect { offset: vec![2, 0], shape: vec![2, 7] };
        let runs: Vec<Run> = contiguous_runs(&whole, &rows, 0..35).collect();
        assert_eq!(runs, [Run { source: 14, destination: 0, count: 14 }]);
        let scalar = Rect::whole(&[]);
        let runs: Vec<Run> = contiguous_runs(&scalar, &scalar, 0..1).collect();
        assert_eq!(runs, [Run { source: 0, destination: 0, count: 1 }]);
    }

    #[test]
    fn tilings_are_told_from_gaps_and_overlaps() -> Result<()> {
        let rect = |offset: &[u64], shape: &[u64]| Rect { offset: offset.to_vec(), shape: shape.to_vec() };
        // Four rectangles form a pinwheel around a centre, so no straight cut separates them.
        let pinwheel =
            [rect(&[0, 0], &[1, 2]), rect(&[0, 2], &[2, 1]), rect(&[1, 0], &[2, 1]), rect(&[1, 1], &[1, 1]), rect(&[2, 1], &[1, 2])];
        assert!(tiles(&[3, 3], &pinwheel)?);
        assert!(!tiles(&[3, 3], &pinwheel[1..])?, "a gap");
        assert!(!tiles(&[4, 2], &[rect(&[0, 0], &[2, 2]), rect(&[1, 0], &[2, 2])])?, "equal volume, but overlap and gap");
        assert!(tiles(&[4, 2], &[rect(&[0, 0], &[1, 2]), rect(&[1, 0], &[3, 2])])?);
        assert!(tiles(&[], &[rect(&[], &[])])?);
        assert!(tiles(&[0, 3], &[rect(&[0, 0], &[0, 3])])?);
        assert!(!tiles(&[2], &[])?);
        Ok(())
    }

    #[test]
    fn slices_outside_a_shape_are_errors() {
        assert!(Slice::rows(3..5).of(&[4, 2]).is_err());
        assert!(Slice::rows(0..1).of(&[]).is_err());
        assert!(Slice::ranges([0..1, std::ops::Range { start: 2, end: 1 }]).of(&[4, 4]).is_err());
    }
}
