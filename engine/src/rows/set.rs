//! A set of rows of a shard, one bit for each row.
//!
//! A bitmap takes the same room whatever the rows are, so the size of a slot does not depend on them. It takes at most an
//! eighth of the shard, because only rows of a byte or more are tracked.

use tensorcask::{Error, Result, TensorView};

/// Rows, counted from the first row of their shard.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RowSet {
    /// Bit `row % 8` of byte `row / 8`.
    bits: Vec<u8>,
}

impl RowSet {
    /// An empty set of rows of a shard that has so many.
    pub(crate) fn of_shard(rows: usize) -> Self {
        Self { bits: vec![0; rows.div_ceil(8)] }
    }

    /// The bitmap.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bits
    }

    /// Adds rows. Rows that the shard does not have are ignored.
    pub(crate) fn insert(&mut self, rows: &[u64]) {
        for row in rows {
            let byte = usize::try_from(row / 8).ok().and_then(|at| self.bits.get_mut(at));
            if let Some(byte) = byte {
                *byte |= 1 << (row % 8);
            }
        }
    }

    /// Adds all rows of another set of the same shard.
    pub(crate) fn add(&mut self, other: &Self) {
        self.bits.iter_mut().zip(&other.bits).for_each(|(ours, theirs)| *ours |= theirs);
    }
}

/// Names the rows of a bitmap as the changed rows of a shard. Fails with `Corrupt` if the bitmap does not fit the shard.
pub(crate) fn with_rows<'a>(view: TensorView<'a>, bits: &[u8]) -> Result<TensorView<'a>> {
    let count = view.rect().shape.first().copied().unwrap_or(0);
    let first = view.rect().offset.first().copied().unwrap_or(0);
    if count.div_ceil(8) != bits.len() as u64 {
        let message = format!("{} bytes for the changed rows of a shard of {count} rows", bits.len());
        return Err(Error::corrupt(message).tensor(view.name()));
    }
    let of_byte = |(at, byte): (u64, &u8)| {
        let byte = *byte;
        (0..8u64).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| at.saturating_mul(8).saturating_add(bit))
    };
    let rows: Vec<u64> = (0..).zip(bits).flat_map(of_byte).collect();
    if rows.last().is_some_and(|row| *row >= count) {
        return Err(Error::corrupt(format!("a changed row beyond the {count} rows of a shard")).tensor(view.name()));
    }
    view.with_changed_rows(&rows.into_iter().map(|row| row.saturating_add(first)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use tensorcask::{Dtype, ErrorKind, Rect, TensorView};

    use super::{RowSet, with_rows};

    #[test]
    fn rows_go_through_a_bitmap_and_come_back_for_their_shard() {
        let mut rows = RowSet::of_shard(11);
        rows.insert(&[0, 7, 8, 200]);
        let mut others = RowSet::of_shard(11);
        others.insert(&[10, 8]);
        rows.add(&others);
        assert_eq!(rows.bytes(), [0b1000_0001, 0b101]);
        let data = [0; 11];
        let rect = Rect { offset: vec![5, 0], shape: vec![11, 1] };
        let view = TensorView::shard("table", Dtype::U8, &[20, 1], rect, &data).unwrap();
        assert_eq!(with_rows(view.clone(), rows.bytes()).unwrap().changed_rows(), Some(&[0, 7, 8, 10][..]));
        for wrong in [&[0; 1][..], &[0; 3], &[0, 0b1000]] {
            assert_eq!(with_rows(view.clone(), wrong).unwrap_err().kind(), ErrorKind::Corrupt, "{wrong:?}");
        }
    }
}
