//! Input of one save, as the stages of the pipeline read it.
//!
//! The stages (base chunks, rounding, partners, changed rows, encoding) are functions of a [`SaveInput`] and of the
//! chunks that they are asked for. None of them changes the input, so they may run for several windows or parameter
//! groups at once.

use std::collections::BTreeMap;

use super::WriterOptions;
use super::cask_writer::{ChunkPlace, ShardLabel};
use super::changed_rows::ChangedRows;
use super::layout::{LayoutTensor, StateLayout};
use super::parent::Parent;
use crate::codec::{Chunk, Codec, Rows, check_assigned};
use crate::precision::{BoundedSetting, Setting};
use crate::tensor::ChunkGrid;
use crate::{Error, Precision, Result, Store, TensorView};

/// A chunk of the state that is being saved.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkRef {
    /// Number of the tensor in the layout.
    pub tensor: usize,
    /// Number of the shard in the tensor.
    pub shard: usize,
    /// Index of the chunk in the grid of the shard.
    pub chunk: u64,
    /// Number of the tensor in the parent's directory, if the parent has the same shard.
    pub base: Option<usize>,
}

/// Settings that were chosen, by tensor name.
#[derive(Debug, Clone, Default)]
pub(super) struct ChosenSettings(pub BTreeMap<String, BoundedSetting>);

impl ChosenSettings {
    /// The setting of a tensor; `None` if its rule does not allow several.
    pub(super) fn of(&self, tensor: &str) -> Option<BoundedSetting> {
        self.0.get(tensor).copied()
    }
}

/// Input of one save.
#[derive(Clone, Copy)]
pub(super) struct SaveInput<'a> {
    pub store: &'a Store,
    pub options: &'a WriterOptions,
    /// Precision of this save.
    pub precision: &'a Precision,
    pub changed_rows: &'a ChangedRows,
    /// Settings that were chosen for tensors whose rules allow several.
    pub settings: &'a ChosenSettings,
    /// Training step of the state.
    pub step: u64,
    pub layout: &'a StateLayout<'a>,
    /// Parent of the delta; `None` for a base.
    pub parent: Option<&'a Parent>,
}

impl<'a> SaveInput<'a> {
    pub(super) fn tensor(&self, at: ChunkRef) -> &'a LayoutTensor<'a> {
        &self.layout.tensors[at.tensor]
    }

    pub(super) fn view(&self, at: ChunkRef) -> &'a TensorView<'a> {
        self.tensor(at).shards[at.shard]
    }

    pub(super) fn grid(&self, at: ChunkRef) -> Result<ChunkGrid> {
        let view = self.view(at);
        ChunkGrid::new(view.dtype(), &view.rect().shape)
    }

    /// Bytes of a chunk as the caller gave them.
    pub(super) fn original(&self, at: ChunkRef) -> Result<&'a [u8]> {
        let view = self.view(at);
        let range = self.grid(at)?.bytes(at.chunk);
        let bytes = view.data().get(range.start as usize..range.end as usize);
        bytes.ok_or_else(|| Error::invalid("a chunk lies outside its shard").tensor(view.name()))
    }

    /// A chunk with this content, as codecs take it, without base and partners.
    pub(super) fn codec_chunk<'d>(&self, at: ChunkRef, data: &'d [u8]) -> Result<Chunk<'d>>
    where
        'a: 'd,
    {
        let grid = self.grid(at).map_err(|e| self.locate(at, e))?;
        let elements = grid.elements(at.chunk);
        Ok(Chunk {
            role: &self.tensor(at).description.role,
            row_elements: grid.row_elements(),
            ..Chunk::new(grid.dtype(), elements.end - elements.start, data)
        })
    }

    /// Setting and bound by which a tensor is rounded.
    pub(super) fn precision(&self, tensor: &LayoutTensor<'_>) -> BoundedSetting {
        let name = &tensor.description.name;
        self.settings.of(name).unwrap_or_else(|| self.precision.of_tensor(tensor.rounding_role(), name))
    }

    /// Settings that the rule of a tensor allows. Empty without a rule.
    pub(super) fn alternatives(&self, tensor: &LayoutTensor<'_>) -> Vec<BoundedSetting> {
        self.precision.alternatives_of_tensor(tensor.rounding_role(), &tensor.description.name)
    }

    /// Id of the codec that a rule assigns to a tensor.
    pub(super) fn assigned_codec(&self, tensor: &LayoutTensor<'_>) -> Option<&'a str> {
        self.options.codecs.of(&tensor.description.role, &tensor.description.name)
    }

    /// Checks that no tensor would be rounded by the rule of another name: tied tensors are stored once.
    pub(super) fn check_tied(&self) -> Result<()> {
        // The settings of a rule that may round the tensor; none if it stays as it is.
        let settings = |tensor: &LayoutTensor<'_>| {
            let allowed = self.alternatives(tensor);
            let rounds = |one: &BoundedSetting| one.setting != Setting::Lossless && one.setting.rounds(tensor.description.dtype);
            if allowed.iter().any(rounds) { allowed } else { Vec::new() }
        };
        for tensor in &self.layout.tensors {
            let Some(stored) = tensor.description.alias_of.and_then(|target| self.layout.tensors.get(target)) else { continue };
            if settings(tensor) != settings(stored) {
                let message = format!(
                    "is tied to `{}` and stored once with it, but their precision rules differ; write one rule that matches both names",
                    stored.description.name
                );
                return Err(Error::invalid(message).tensor(&tensor.description.name));
            }
        }
        Ok(())
    }

    /// Warns of tensors that a rule would round if their roles were more than guesses.
    pub(super) fn warn_of_guesses(&self) {
        let would_round = |tensor: &&LayoutTensor<'_>| {
            let description = &tensor.description;
            let setting = self.precision.of(&description.role, &description.name).setting;
            tensor.rounding_role().is_none() && setting.rounds(description.dtype) && self.precision(tensor).setting == Setting::Lossless
        };
        let mut guessed = self.layout.tensors.iter().filter(would_round);
        if let Some(first) = guessed.next() {
            let others = guessed.count();
            tracing::warn!(
                tensor = %first.description.name,
                role = %first.description.role,
                others,
                "stored without loss, because the role is a guess from the name; state the role, or write a precision rule for the name"
            );
        }
    }

    /// Checks that the rules assign only codecs that exist and can store their tensors.
    pub(super) fn check_codecs(&self) -> Result<()> {
        let registry = self.store.registry();
        self.options.codecs.check(registry)?;
        for tensor in &self.layout.tensors {
            let Some(codec) = self.assigned_codec(tensor).and_then(|id| registry.get(id)) else { continue };
            let rounds = |bounded: &BoundedSetting| bounded.setting.codec().is_some_and(|rounding| rounding.id() == codec.id());
            let may_round = self.alternatives(tensor).iter().any(rounds);
            let description = &tensor.description;
            let checked = check_assigned(codec.as_ref(), description.dtype, &description.role, may_round);
            checked.map_err(|e| e.tensor(&description.name))?;
        }
        Ok(())
    }

    /// Rows of a chunk that may differ from its base; `None` if the caller named none, or if the chunk has no base.
    pub(super) fn changed_rows(&self, at: ChunkRef) -> Result<Option<Vec<u64>>> {
        let (Some(_), Some(parent)) = (at.base, self.parent) else { return Ok(None) };
        // The base may have been rounded by another profile. Then rows that did not change differ from the base.
        if self.options.precision.is_auto() {
            return Ok(None);
        }
        // A master whose role was proven by values may have been rounded in the base, and not now.
        if !self.view(at).is_role_certain() && !self.precision.is_lossless() {
            return Ok(None);
        }
        // A setting that is not elementwise rounds a row by other rows of the chunk. Rows that did not change may then
        // differ from the base.
        if !self.precision(self.tensor(at)).setting.is_elementwise() {
            return Ok(None);
        }
        // The base may have been rounded with another weight.
        if self.tensor(at).is_paired() && !self.precision.is_lossless() {
            return Ok(None);
        }
        // A master is rounded relative to its model weight, for which the same holds.
        let model = self.layout.partner(at.tensor, "model", self.view(at).rect()).map(|(number, _)| &self.layout.tensors[number]);
        if model.is_some_and(|model| !self.precision(model).setting.is_elementwise()) {
            return Ok(None);
        }
        // A chunk that exceeds its bound is rounded as a whole with a finer setting.
        if self.precision(self.tensor(at)).bound.is_some() {
            return Ok(None);
        }
        // Rows that did not change may differ from a base with another setting.
        if self.settings.of(&self.tensor(at).description.name).is_some() {
            return Ok(None);
        }
        // With these rows, the base is not read. An assigned codec may need it.
        if self.assigned_codec(self.tensor(at)).is_some_and(|codec| codec != Rows.id()) {
            return Ok(None);
        }
        self.changed_rows.of_chunk(parent.snapshot.record().id, self.view(at), at.chunk)
    }

    /// Hashes of the rows of a chunk's base, by which changed rows are checked without the base; `None` if they are not
    /// kept.
    pub(super) fn row_hashes(&self, at: ChunkRef) -> Result<Option<&'a [u32]>> {
        let (Some(_), Some(parent)) = (at.base, self.parent) else { return Ok(None) };
        let rows = self.codec_chunk(at, self.original(at)?)?.rows();
        let hashes = self.changed_rows.hashes(parent.snapshot.record().id, self.view(at), at.chunk);
        Ok(hashes.filter(|hashes| rows.is_some_and(|(_, count)| count == hashes.len())))
    }

    /// Rows of a chunk that may differ from its base, if they can be checked without the base.
    pub(super) fn checkable_rows(&self, at: ChunkRef) -> Result<Option<Vec<u64>>> {
        match self.changed_rows(at)? {
            Some(rows) if rows.is_empty() || self.row_hashes(at)?.is_some() => Ok(Some(rows)),
            _ => Ok(None),
        }
    }

    /// Place of a chunk in the cask.
    pub(super) fn place(&self, at: ChunkRef) -> ChunkPlace<'a> {
        ChunkPlace { shard: label(self.view(at)), chunk: at.chunk }
    }

    /// The error, with tensor and chunk named.
    pub(super) fn locate(&self, at: ChunkRef, error: Error) -> Error {
        error.tensor(self.view(at).name()).chunk(at.chunk)
    }
}

/// A shard, as the index of a cask describes it.
pub(super) fn label<'a>(view: &'a TensorView<'_>) -> ShardLabel<'a> {
    ShardLabel { tensor: view.name(), dtype: view.dtype(), shape: view.shape(), rect: view.rect() }
}
