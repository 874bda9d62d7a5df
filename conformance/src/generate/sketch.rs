//! Cases before they are written.

use std::collections::BTreeMap;

use serde_json::Value;

/// The input of a case.
pub(crate) enum Input {
    Cask(Vec<u8>),
    /// Objects by path.
    Store(BTreeMap<String, Vec<u8>>),
    /// A store that is too large to keep. The command `make` writes it when it is needed.
    Large(BTreeMap<String, Vec<u8>>),
}

/// What must become of it.
pub(crate) enum Outcome {
    /// What a reader finds.
    Accept(Value),
    /// The kind of the error.
    Reject(&'static str),
    /// The spec leaves it to the reader: what one finds that accepts, the kind of the error of one that does not.
    Either(Value, &'static str),
}

/// A case to write.
pub(crate) struct Sketch {
    /// `<area>/<case>`.
    pub name: String,
    pub clause: String,
    pub why: String,
    pub input: Input,
    pub outcome: Outcome,
}

/// With the keys of all objects in order, whether serde_json keeps the order of insertion or not.
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
