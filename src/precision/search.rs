//! Finds the setting that takes the fewest bytes within an error budget.

use super::{BoundedSetting, RoundingReport, Setting, round};
use crate::codec::{Chunk, Cluster, EncodeCheck, KMeans, Objective, Registry, encode_chunk};
use crate::tensor::ChunkGrid;
use crate::{Dtype, Result, TensorView};

/// Result of trying a setting on a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundingChoice {
    /// The setting.
    pub setting: Setting,
    /// Stored size of the tensor in bytes.
    pub stored_bytes: u64,
    /// Rounding error.
    pub rounding: RoundingReport,
}

/// Settings to try with logarithmic steps, or with bits beyond the 16-bit rounding, from coarse to fine within each kind.
pub(super) fn steps_and_bits() -> impl Iterator<Item = Setting> {
    let steps = [1u8, 2, 4, 8, 16, 32, 64, 128].map(|steps| Setting::LogUniform { steps });
    let bits = [0u8, 2, 4, 6, 8, 10, 12].map(|bits| Setting::Remainder { bits });
    steps.into_iter().chain(bits)
}

/// Numbers of levels to try, from coarse to fine: 2, 4, 6 and 8 bits.
pub(super) fn levels() -> [KMeans; 4] {
    [4u16, 16, 64, 256].map(|levels| KMeans { levels, ..KMeans::default() })
}

/// Returns the settings to try for a tensor of this type, from coarse to fine within each kind.
fn candidates(dtype: Dtype) -> Vec<Setting> {
    let others = [Setting::Cluster(Cluster::default()), Setting::Blockwise8, Setting::Lossless];
    let all = steps_and_bits().chain(levels().map(Setting::KMeans)).chain(others);
    all.filter(|setting| *setting == Setting::Lossless || setting.rounds(dtype)).collect()
}

/// Returns the accepted setting with which a tensor takes the fewest bytes, or `Lossless` if no other setting is
/// accepted.
///
/// `evaluate` decides which settings are accepted. It gets each setting and its error, smallest size first. It may
/// compare the error with a budget, or test a model with the rounded state.
///
/// ```
/// use tensorcask::precision::{Setting, search};
/// use tensorcask::{Dtype, TensorView};
/// let values: Vec<u8> = (1..4000).flat_map(|i| (1.0 / i as f32).to_le_bytes()).collect();
/// let tensor = TensorView::new("exp_avg.w", Dtype::F32, &[3999], &values)?;
/// let found = search(&tensor, |_, errors| errors.max_relative <= 0.05)?;
/// assert_ne!(found.setting, Setting::Lossless);
/// assert!(found.rounding.max_relative <= 0.05 && found.stored_bytes < 8000);
/// # Ok::<(), tensorcask::Error>(())
/// ```
pub fn search(tensor: &TensorView<'_>, mut evaluate: impl FnMut(&Setting, &RoundingReport) -> bool) -> Result<RoundingChoice> {
    let mut tried =
        candidates(tensor.dtype()).into_iter().map(|setting| tried(tensor, setting)).collect::<Result<Vec<RoundingChoice>>>()?;
    tried.sort_by_key(|found| found.stored_bytes);
    let lossless = tried.iter().find(|found| found.setting == Setting::Lossless).copied();
    let accepted = tried.into_iter().find(|found| found.setting == Setting::Lossless || evaluate(&found.setting, &found.rounding));
    accepted.or(lossless).ok_or_else(|| crate::Error::invalid("no setting was tried"))
}

/// A chunk with a setting.
pub(super) struct ChunkTrial {
    /// The chunk as stored.
    pub data: Vec<u8>,
    /// Bytes of its columns.
    pub bytes: u64,
    /// Rounding error; `None` if the chunk was not rounded.
    pub rounding: Option<RoundingReport>,
}

/// Rounds a chunk, and encodes it in the smallest form.
pub(super) fn try_chunk(chunk: &Chunk<'_>, setting: Setting) -> Result<ChunkTrial> {
    let registry = Registry::default();
    let rounded = round(BoundedSetting { setting, bound: None }, chunk)?;
    let size = |columns: &[(&'static str, Vec<u8>)]| columns.iter().map(|(_, column)| column.len() as u64).sum::<u64>();
    let encoded = encode_chunk(&registry, Objective::SMALLEST, &Chunk { data: &rounded.data, ..*chunk }, EncodeCheck::Skip)?;
    let lossless: u64 = encoded.columns.iter().map(|(_, column)| column.len() as u64).sum();
    let own = rounded.given.map(|given| size(&given.encoded.columns));
    Ok(ChunkTrial {
        bytes: own.map_or(lossless, |own| own.min(lossless)),
        rounding: rounded.errors.map(|errors| RoundingReport::of_chunk(&errors, chunk.element_count)),
        data: rounded.data.into_owned(),
    })
}

fn tried(tensor: &TensorView<'_>, setting: Setting) -> Result<RoundingChoice> {
    let grid = ChunkGrid::new(tensor.dtype(), &tensor.rect().shape)?;
    let mut found = RoundingChoice { setting, stored_bytes: 0, rounding: RoundingReport::default() };
    for number in 0..grid.chunk_count() {
        let bytes = grid.bytes(number);
        let elements = grid.elements(number);
        let data = tensor.data().get(bytes.start as usize..bytes.end as usize).unwrap_or_default();
        let count = elements.end.saturating_sub(elements.start);
        let chunk = Chunk { role: tensor.role(), row_elements: grid.row_elements(), ..Chunk::new(tensor.dtype(), count, data) };
        let ChunkTrial { bytes, rounding, .. } = try_chunk(&chunk, setting)?;
        found.stored_bytes += bytes;
        found.rounding = rounding.map_or(found.rounding, |rounding| found.rounding.and(rounding));
    }
    Ok(found)
}
