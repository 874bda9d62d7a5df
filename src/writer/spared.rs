//! Spared bases: families of chunks that are stored without their bases, because deltas would save little.
//!
//! A delta several steps after its base gains nothing for a master or a first moment, and a few percent for a second
//! moment. Its base would have to be read and decoded by this save and by every restore. [`spare_bases`] gives up
//! deltas as long as the whole snapshot grows by at most [`MAX_GROWTH_PER_MILLE`]. Families whose deltas save the least
//! come first. A family whose deltas save much keeps them, however small the family is: its bases take little time.
//!
//! Invariant: the result depends on the sizes alone.

/// Thousandths by which a snapshot may grow.
const MAX_GROWTH_PER_MILLE: u128 = 10;

/// Thousandths by which a chunk may grow.
const MAX_CHUNK_GROWTH_PER_MILLE: u128 = 100;

/// Sizes of a family, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FamilySizes {
    /// Decoded size of all chunks.
    pub decoded: u64,
    /// Decoded size of a sampled chunk.
    pub sample: u64,
    /// Stored size of the sampled chunk by the best codec.
    pub best: u64,
    /// Stored size of the sampled chunk without its base, if that is larger.
    pub absolute: Option<u64>,
}

impl FamilySizes {
    fn scaled(&self, bytes: u64) -> u128 {
        u128::from(self.decoded).saturating_mul(u128::from(bytes)) / u128::from(self.sample.max(1))
    }

    /// Bytes by which all chunks grow without their bases; `None` if that is not known, or too much.
    fn growth(&self) -> Option<u128> {
        let growth = self.absolute?.saturating_sub(self.best);
        let is_small = u128::from(growth) * 1000 <= u128::from(self.best) * MAX_CHUNK_GROWTH_PER_MILLE;
        is_small.then(|| self.scaled(growth))
    }
}

/// Decides for each family whether its bases are spared.
pub(super) fn spare_bases(families: &[FamilySizes]) -> Vec<bool> {
    let total = families.iter().map(|family| family.scaled(family.best)).fold(0, u128::saturating_add);
    let mut budget = total.saturating_mul(MAX_GROWTH_PER_MILLE) / 1000;
    let mut by_growth: Vec<(u128, u128, usize)> = Vec::new();
    for (number, family) in families.iter().enumerate() {
        let Some(growth) = family.growth() else { continue };
        by_growth.push((growth.saturating_mul(1_000_000) / u128::from(family.decoded.max(1)), growth, number));
    }
    by_growth.sort_unstable();
    let mut spared = vec![false; families.len()];
    for (_, growth, number) in by_growth {
        if growth <= budget {
            budget -= growth;
            spared[number] = true;
        }
    }
    spared
}

#[cfg(test)]
mod tests {
    use super::{FamilySizes, spare_bases};

    fn family(decoded: u64, best: u64, absolute: Option<u64>) -> FamilySizes {
        FamilySizes { decoded, sample: 1000, best, absolute }
    }

    /// Model, master and both moments, as measured ten steps after the base.
    #[test]
    fn ten_steps_later_only_the_model_needs_its_base() {
        let families = [family(50, 335, Some(658)), family(100, 500, None), family(100, 833, Some(834)), family(100, 753, Some(773))]
            .map(|family| FamilySizes { decoded: family.decoded * 1_000_000, ..family });
        assert_eq!(spare_bases(&families), [false, false, true, true]);
    }

    #[test]
    fn a_snapshot_grows_by_at_most_one_percent() {
        // Each delta saves 0.9 % of the snapshot.
        assert_eq!(spare_bases(&[family(500_000, 1000, Some(1018)), family(500_000, 1000, Some(1018))]), [true, false]);
        assert_eq!(spare_bases(&[family(500_000, 1000, Some(1030)), family(500_000, 1000, Some(1018))]), [false, true]);
    }

    #[test]
    fn nothing_is_spared_one_step_after_the_base() {
        assert_eq!(spare_bases(&[family(500_000, 3, Some(500)), family(500_000, 8, Some(773))]), [false, false]);
        // Small parameters as well.
        assert_eq!(spare_bases(&[family(500_000, 500, None), family(1, 3, Some(500))]), [false, false]);
        assert_eq!(spare_bases(&[]), Vec::<bool>::new());
        assert_eq!(spare_bases(&[FamilySizes { decoded: u64::MAX, sample: 0, best: u64::MAX, absolute: Some(u64::MAX) }]), [true]);
    }
}
