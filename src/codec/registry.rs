//! The set of codecs that a writer chooses from and a reader can decode.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{
    Bitmask, Blockwise8, Cluster, Codec, CodecRef, Constant, Descent, Factored, Gradient, Joint, KMeans, LogUniform, Magnitudes, Need,
    Ordered, Planes, Predict, Raw, Remainder, Replay, Rounded, Rows, Sparse,
};
use crate::{Dtype, Error, Result};

/// Clause of `spec/` by which a reader refuses a codec that it does not know.
pub(crate) const UNKNOWN_CODEC: &str = "codecs 2";

/// A set of codecs, by id. Cheap to clone.
///
/// ```
/// let registry = tensorcask::codec::Registry::default();
/// assert!(registry.get("tc.bitmask").is_some());
/// ```
#[derive(Debug, Clone)]
pub struct Registry {
    codecs: BTreeMap<String, Arc<dyn Codec>>,
}

impl Default for Registry {
    /// Creates a registry with all codecs of this library.
    fn default() -> Self {
        let mut registry = Self { codecs: BTreeMap::new() };
        for codec in [
            Arc::new(Raw) as Arc<dyn Codec>,
            Arc::new(Constant),
            Arc::new(Bitmask),
            Arc::new(Rows),
            Arc::new(Planes),
            Arc::new(Factored),
            Arc::new(Magnitudes),
            Arc::new(Ordered),
            Arc::new(Sparse),
            Arc::new(Rounded),
            Arc::new(LogUniform),
            Arc::new(Cluster::default()),
            Arc::new(KMeans::default()),
            Arc::new(Blockwise8),
            Arc::new(Remainder),
            Arc::new(Predict),
            Arc::new(Replay::default()),
            Arc::new(Descent::default()),
            Arc::new(Gradient::default()),
            Arc::new(Joint::default()),
        ] {
            registry.codecs.insert(codec.id().to_owned(), codec);
        }
        registry
    }
}

impl Registry {
    /// Adds a codec. A duplicate id, or a foreign id that starts with `tc.`, is an error.
    pub fn with(mut self, codec: Arc<dyn Codec>) -> Result<Self> {
        let id = codec.id().to_owned();
        if id.is_empty() || id.starts_with("tc.") || self.codecs.contains_key(&id) {
            return Err(Error::invalid(format!("codec id `{}` is empty, taken, or reserved", id.escape_debug())));
        }
        self.codecs.insert(id, codec);
        Ok(self)
    }

    /// Keeps one codec. A writer uses that codec for each chunk that it can encode, and raw for the others.
    ///
    /// ```
    /// let registry = tensorcask::codec::Registry::default().only("tc.planes")?;
    /// assert_eq!(registry.iter().count(), 1);
    /// # Ok::<(), tensorcask::Error>(())
    /// ```
    pub fn only(mut self, id: &str) -> Result<Self> {
        self.codecs.retain(|known, _| known == id);
        match self.codecs.is_empty() {
            true => Err(Error::invalid(format!("codec `{}` is unknown", id.escape_debug()))),
            false => Ok(self),
        }
    }

    /// Returns the codec with the given id.
    pub fn get(&self, id: &str) -> Option<&Arc<dyn Codec>> {
        self.codecs.get(id)
    }

    /// Iterates over all codecs, by id.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Codec>> {
        self.codecs.values()
    }

    /// Partners that a stored chunk of a tensor of this role needs. Empty for an unknown codec.
    pub(crate) fn needs(&self, codec: &CodecRef, role: &str) -> &'static [Need] {
        self.codecs.get(&codec.id).map_or(&[], |codec| codec.needs(role))
    }

    /// Partners that any codec may need for a tensor of this role.
    pub(crate) fn partner_roles(&self, role: &str) -> Vec<Need> {
        let mut all: Vec<Need> = Vec::new();
        for need in self.codecs.values().flat_map(|codec| codec.needs(role)) {
            match all.iter_mut().find(|known| known.role == need.role) {
                Some(known) => known.merge(*need),
                None => all.push(*need),
            }
        }
        all
    }

    /// Partners that help any codec to encode a tensor of this element type and role.
    pub(crate) fn hint_roles(&self, dtype: Dtype, role: &str) -> Vec<Need> {
        let mut all: Vec<Need> = Vec::new();
        for hint in self.codecs.values().flat_map(|codec| codec.hints(dtype, role)) {
            match all.iter_mut().find(|known| known.role == hint.role) {
                Some(known) => known.merge(*hint),
                None => all.push(*hint),
            }
        }
        all
    }

    /// Returns the codec of the id and version that a cask names.
    pub fn resolve(&self, wanted: &CodecRef) -> Result<&Arc<dyn Codec>> {
        match self.codecs.get(&wanted.id) {
            Some(codec) if codec.version() == wanted.version => Ok(codec),
            Some(codec) => Err(Error::unsupported(format!(
                "codec `{}` has version {}, but this reader has version {}; upgrade tensorcask",
                wanted.id,
                wanted.version,
                codec.version()
            ))
            .clause(UNKNOWN_CODEC)),
            None => Err(Error::unsupported(format!("codec `{}` is unknown; register it, or upgrade tensorcask", wanted.id.escape_debug()))
                .clause(UNKNOWN_CODEC)),
        }
    }
}
