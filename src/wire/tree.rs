//! The blob `tc.tree`: the nesting of the tensors and values of a state. Spec: `spec/tree.md`.
//!
//! Nodes form one flat list, parents before children, so neither writing nor reading recurses.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::seal;
use crate::version::FormatVersion;
use crate::{Error, Limits, Result};

const FORMAT: &str = "tensorcask-tree";

/// Greatest nesting depth of containers.
const MAX_DEPTH: usize = 512;

/// A node of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TreeNode {
    /// A mapping, given by its keys. One value per key follows.
    Dict(Vec<TreeKey>),
    /// A list of this length. Its values follow.
    List(u64),
    /// One rank's part of a list, given by ascending positions. One value per position follows.
    Part(Vec<u64>),
    /// An immutable list (a tuple) of this length. Its values follow.
    Tuple(u64),
    /// The value that follows has this type in the program that saved it. Other programs take the value as it is.
    Typed(String),
    /// A tensor: its name and its framework.
    Tensor(String, String),
    /// Bytes: the name of the blob that holds them.
    Bytes(String),
    /// An in-memory file: the name of the blob that holds its bytes.
    File(String),
    /// Text.
    Str(String),
    /// An integer of any size, in decimal.
    Int(String),
    /// The bits of a binary64: 16 hexadecimal digits, sign first.
    Float(String),
    /// A Boolean.
    Bool(bool),
    /// A null value.
    None,
}

/// A key of a mapping.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TreeKey {
    /// Text.
    Str(String),
    /// An integer of any size, in decimal.
    Int(String),
}

/// Nesting of the tensors and values of a state.
///
/// ```
/// use tensorcask::{Limits, wire::{Tree, TreeKey, TreeNode}};
/// let nodes = vec![TreeNode::Dict(vec![TreeKey::Str("w".into())]), TreeNode::Tensor("w".into(), "torch".into())];
/// let bytes = Tree::new(nodes)?.encode()?;
/// assert_eq!(Tree::decode(&bytes, &Limits::default())?.nodes().len(), 2);
/// assert!(Tree::new(vec![TreeNode::List(2), TreeNode::None]).is_err());
/// # Ok::<(), tensorcask::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tree {
    format: String,
    version: String,
    must_understand: Vec<String>,
    may_ignore: Vec<String>,
    nodes: Vec<TreeNode>,
}

impl Tree {
    /// Name of the blob.
    pub const BLOB: &str = "tc.tree";

    /// Creates a tree from nodes, parents before children.
    pub fn new(nodes: Vec<TreeNode>) -> Result<Self> {
        check(&nodes).map_err(|(message, _)| Error::invalid(message))?;
        let version = FormatVersion::CURRENT.to_string();
        Ok(Self { format: FORMAT.into(), version, must_understand: vec![], may_ignore: vec![], nodes })
    }

    /// Nodes, parents before children.
    pub fn nodes(&self) -> &[TreeNode] {
        &self.nodes
    }

    /// Encodes the tree.
    pub fn encode(&self) -> Result<Vec<u8>> {
        seal::seal(self)
    }

    /// Decodes a tree.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Self> {
        let (json, _) = seal::open_seal(bytes, limits.max_blob_bytes)?;
        seal::check_preamble(json, FORMAT)?;
        let tree: Self = seal::parse(json)?;
        check(&tree.nodes).map_err(|(message, clause)| Error::corrupt(message).clause(clause))?;
        if tree.encode()? != bytes {
            return Err(Error::corrupt("the tree is not in canonical form").clause("tree 1.2"));
        }
        Ok(tree)
    }
}

type Fault = (String, &'static str);

/// Checks that nodes form exactly one value, that keys of a mapping differ, and that numbers are in canonical form.
fn check(nodes: &[TreeNode]) -> Result<(), Fault> {
    // Number of values still missing in each open container.
    let mut open: Vec<u64> = vec![1];
    for node in nodes {
        while open.last() == Some(&0) {
            open.pop();
        }
        match open.last_mut() {
            Some(left) => *left = left.saturating_sub(1),
            None => return Err(("more nodes than the containers need".into(), "tree 2.2")),
        }
        let children = match node {
            TreeNode::Dict(keys) => {
                let mut seen = HashSet::new();
                for key in keys {
                    if let TreeKey::Int(text) = key {
                        check_int(text)?;
                    }
                    if !seen.insert(key) {
                        return Err((format!("a mapping has the key {key:?} twice"), "tree 2.3"));
                    }
                }
                keys.len() as u64
            }
            TreeNode::List(count) | TreeNode::Tuple(count) => *count,
            TreeNode::Typed(_) => 1,
            TreeNode::Part(positions) => {
                if positions.iter().zip(positions.iter().skip(1)).any(|(a, b)| a >= b) {
                    return Err(("positions in a part of a list do not ascend".into(), "tree 3.1"));
                }
                positions.len() as u64
            }
            TreeNode::Int(text) => check_int(text).map(|()| 0)?,
            TreeNode::Float(text) if text.len() != 16 || !text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) => {
                return Err((format!("`{}` is not 16 hexadecimal digits", text.escape_debug()), "tree 2.5"));
            }
            _ => 0,
        };
        if children > 0 {
            open.push(children);
        }
        if open.len() > MAX_DEPTH {
            return Err((format!("the tree nests deeper than {MAX_DEPTH}"), "tree 2.6"));
        }
    }
    match open.iter().all(|&left| left == 0) {
        true => Ok(()),
        false => Err(("fewer nodes than the containers need".into(), "tree 2.2")),
    }
}

fn check_int(text: &str) -> Result<(), Fault> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    match plain && (text == "0" || !digits.starts_with('0')) {
        true => Ok(()),
        false => Err((format!("`{}` is not an integer in canonical form", text.escape_debug()), "tree 2.4")),
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a panic fails the test")]
mod tests {
    use super::*;

    fn sample() -> Vec<TreeNode> {
        let key = |text: &str| TreeKey::Str(text.into());
        vec![
            TreeNode::Dict(vec![key("model"), key("lr"), TreeKey::Int("-3".into()), key("e"), key("at")]),
            TreeNode::List(2),
            TreeNode::Tensor("model.0".into(), "torch".into()),
            TreeNode::Tuple(0),
            TreeNode::Float(format!("{:016x}", f64::NAN.to_bits())),
            TreeNode::Int("123456789012345678901234567890".into()),
            TreeNode::None,
            TreeNode::Typed("torch.dtype".into()),
            TreeNode::Str("float32".into()),
        ]
    }

    #[test]
    fn trees_come_back() {
        let bytes = Tree::new(sample()).unwrap().encode().unwrap();
        assert_eq!(Tree::decode(&bytes, &Limits::default()).unwrap().nodes(), sample());
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                assert!(Tree::decode(&damaged, &Limits::default()).is_err(), "byte {at}");
            }
            assert!(Tree::decode(&bytes[..at], &Limits::default()).is_err());
        }
    }

    /// Each case keeps a valid seal, so only the tree is at fault.
    #[test]
    fn other_forms_are_refused() {
        let good = String::from_utf8(Tree::new(sample()).unwrap().encode().unwrap()).unwrap();
        let json = good.lines().next().unwrap();
        let cases = [
            (r#"{"list":2}"#, r#"{"list":3}"#, "tree 2.2"),
            (r#"{"list":2}"#, r#"{"list":1}"#, "tree 2.2"),
            (r#"{"str":"lr"}"#, r#"{"str":"model"}"#, "tree 2.3"),
            (r#""-3""#, r#""-03""#, "tree 2.4"),
            (r#""-3""#, r#""-0""#, "tree 2.4"),
            (r#""-3""#, r#""+3""#, "tree 2.4"),
            ("7ff8", "7FF8", "tree 2.5"),
            (r#""torch""#, r#""\u0074orch""#, "tree 1.2"),
            (r#"{"list":2}"#, r#"{ "list":2}"#, "tree 1.2"),
            (r#"{"list":2}"#, r#"{"part":[1,1]}"#, "tree 3.1"),
            (r#""none""#, r#"{"set":[]}"#, "log 1.3"),
            (r#",{"str":"float32"}"#, "", "tree 2.2"),
        ];
        for (from, to, clause) in cases {
            assert!(json.contains(from), "{from}");
            let mut bytes = json.replacen(from, to, 1).into_bytes();
            bytes.push(b'\n');
            let digest = super::super::Digest::of(&bytes).to_hex();
            bytes.extend_from_slice(format!("sha256:{digest}\n").as_bytes());
            let error = Tree::decode(&bytes, &Limits::default()).unwrap_err();
            assert_eq!(error.clause_name(), Some(clause), "{to}: {error}");
        }
        let deep = |depth| std::iter::repeat_n(TreeNode::List(1), depth).chain([TreeNode::None]).collect::<Vec<_>>();
        assert!(Tree::new(deep(500)).is_ok());
        assert!(Tree::new(deep(100_000)).is_err());
    }
}
