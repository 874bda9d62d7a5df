//! Cases before they are written.

use std::collections::BTreeMap;

use serde_json::Value;

/// Input of a case.
pub(crate) enum Input {
    Cask(Vec<u8>),
    /// Objects by path.
    Store(BTreeMap<String, Vec<u8>>),
    /// Objects of a store that is too large to keep. The command `make` writes them when they are needed.
    Large(BTreeMap<String, Vec<u8>>),
}

/// Expected outcome of a case.
pub(crate) enum Outcome {
    /// Acceptance, with the expected report.
    Accept(Value),
    /// Rejection, with the kind of the error.
    Reject(&'static str),
    /// Choice of the reader: expected report of an accepting reader, kind of the error of a rejecting one.
    Either(Value, &'static str),
}

/// A case to write.
pub(crate) struct Sketch {
    /// Name as `<area>/<case>`.
    pub name: String,
    pub clause: String,
    pub why: String,
    pub input: Input,
    pub outcome: Outcome,
}

/// Sorts the keys of all objects, whether or not serde_json keeps the order of insertion.
pub(crate) fn sorted(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(sorted).collect(),
        Value::Object(fields) => {
            let fields: BTreeMap<&String, Value> = fields.iter().map(|(key, value)| (key, sorted(value))).collect();
            Value::Object(fields.into_iter().map(|(key, value)| (key.clone(), value)).collect())
        }
        other => other.clone(),
    }
}
