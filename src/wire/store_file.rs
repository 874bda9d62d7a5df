//! `store.json`: identifies a store. Created once. Spec: `spec/log.md`, clause 2.

use serde::{Deserialize, Serialize};

use super::{Id, seal};
use crate::version::FormatVersion;
use crate::{Limits, Result};

/// Path of the object below the store's root.
pub(crate) const STORE_FILE: &str = "store.json";

const FORMAT: &str = "tensorcask-store";

/// Content of `store.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreFile {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    /// Id of the training run.
    pub run: Id,
}

impl StoreFile {
    /// Creates the content for a new run.
    pub fn new(run: Id) -> Self {
        Self { format: FORMAT.into(), version: FormatVersion::CURRENT.to_string(), must_understand: vec![], may_ignore: vec![], run }
    }

    /// The content for another run with the same features.
    pub fn for_run(self, run: Id) -> Self {
        Self { run, ..self }
    }

    /// Features that a reader may ignore, but a writer may not.
    pub fn may_ignore(&self) -> &[String] {
        &self.may_ignore
    }

    /// Encodes the file.
    pub fn encode(&self) -> Result<Vec<u8>> {
        seal::seal(self)
    }

    /// Decodes a file.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Self> {
        let (json, _) = seal::open_seal(bytes, limits.max_entry_bytes)?;
        seal::check_preamble(json, FORMAT)?;
        seal::parse(json)
    }
}
