//! Trees as lists of pairs: kind and value of each node, parents before children. The library defines the stored form.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use tensorcask::Limits;
use tensorcask::wire::{Tree, TreeKey, TreeNode};

use crate::errors::raise;

/// Encodes a tree to its stored form.
#[pyfunction]
pub(crate) fn encode_tree<'py>(py: Python<'py>, nodes: Vec<(String, Bound<'py, PyAny>)>) -> PyResult<Bound<'py, PyBytes>> {
    let nodes: Vec<TreeNode> = nodes.iter().map(|(kind, value)| node(kind, value)).collect::<PyResult<_>>()?;
    let bytes = Tree::new(nodes).and_then(|tree| tree.encode()).map_err(|e| raise(&e))?;
    Ok(PyBytes::new(py, &bytes))
}

/// Decodes a tree from its stored form.
#[pyfunction]
pub(crate) fn decode_tree<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyList>> {
    let tree = Tree::decode(bytes, &Limits::default()).map_err(|e| raise(&e.object(Tree::BLOB)))?;
    let list = PyList::empty(py);
    for node in tree.nodes() {
        let (kind, value) = pair(py, node)?;
        list.append(PyTuple::new(py, [kind.into_pyobject(py)?.into_any(), value])?)?;
    }
    Ok(list)
}

fn node(kind: &str, value: &Bound<'_, PyAny>) -> PyResult<TreeNode> {
    Ok(match kind {
        "dict" => TreeNode::Dict(value.try_iter()?.map(|key| key_of(&key?)).collect::<PyResult<_>>()?),
        "list" => TreeNode::List(value.extract()?),
        "part" => TreeNode::Part(value.extract()?),
        "tuple" => TreeNode::Tuple(value.extract()?),
        "typed" => TreeNode::Typed(value.extract()?),
        "tensor" => {
            let (name, framework) = value.extract()?;
            TreeNode::Tensor(name, framework)
        }
        "bytes" => TreeNode::Bytes(value.extract()?),
        "file" => TreeNode::File(value.extract()?),
        "str" => TreeNode::Str(value.extract()?),
        "int" => TreeNode::Int(decimal(value)?),
        "float" => TreeNode::Float(format!("{:016x}", value.extract::<f64>()?.to_bits())),
        "bool" => TreeNode::Bool(value.extract()?),
        "none" => TreeNode::None,
        _ => return Err(PyValueError::new_err(format!("`{kind}` is not a kind of node"))),
    })
}

fn key_of(key: &Bound<'_, PyAny>) -> PyResult<TreeKey> {
    match key.extract::<String>() {
        Ok(text) => Ok(TreeKey::Str(text)),
        Err(_) => decimal(key).map(TreeKey::Int),
    }
}

/// Converts an integer to decimal text. Python raises an error for more than some thousand digits, in both directions.
fn decimal(value: &Bound<'_, PyAny>) -> PyResult<String> {
    value.call_method1("__format__", ("d",))?.extract()
}

fn pair<'py>(py: Python<'py>, node: &TreeNode) -> PyResult<(&'static str, Bound<'py, PyAny>)> {
    let integer = |text: &str| py.get_type::<pyo3::types::PyInt>().call1((text,));
    let text = |text: &str| text.into_pyobject(py).map(Bound::into_any).map_err(PyErr::from);
    Ok(match node {
        TreeNode::Dict(keys) => {
            let list = PyList::empty(py);
            for key in keys {
                match key {
                    TreeKey::Str(key) => list.append(key)?,
                    TreeKey::Int(key) => list.append(integer(key)?)?,
                }
            }
            ("dict", list.into_any())
        }
        TreeNode::List(count) => ("list", count.into_pyobject(py)?.into_any()),
        TreeNode::Part(positions) => ("part", positions.into_pyobject(py)?.into_any()),
        TreeNode::Tuple(count) => ("tuple", count.into_pyobject(py)?.into_any()),
        TreeNode::Typed(name) => ("typed", text(name)?),
        TreeNode::Tensor(name, framework) => ("tensor", (name, framework).into_pyobject(py)?.into_any()),
        TreeNode::Bytes(name) => ("bytes", text(name)?),
        TreeNode::File(name) => ("file", text(name)?),
        TreeNode::Str(value) => ("str", text(value)?),
        TreeNode::Int(value) => ("int", integer(value)?),
        TreeNode::Float(hex) => {
            let bits = u64::from_str_radix(hex, 16).map_err(|_| PyValueError::new_err("not a float"))?;
            ("float", f64::from_bits(bits).into_pyobject(py)?.into_any())
        }
        TreeNode::Bool(value) => ("bool", value.into_pyobject(py)?.to_owned().into_any()),
        TreeNode::None => ("none", py.None().into_bound(py)),
    })
}
