"""The blobs `tc.tree` (spec/tree.md), `tc.errors` (spec/errors.md) and `tc.statistics` (spec/statistics.md)."""

import importlib.util
import io
import json
import re
from math import isfinite
from typing import Any

from .dtypes import DTYPES, chunk_count, elements_of_chunk
from .errors import LIMITS, corrupt
from .sealed import COMMON, check_fields, is_number, is_text, unseal

TREE, ERRORS, STATISTICS = "tc.tree", "tc.errors", "tc.statistics"
MAX_DEPTH = 512
INTEGER = re.compile(r"0|-?[1-9][0-9]*")
FLOAT = re.compile(r"[0-9a-f]{16}")
Blobs = dict[tuple[int, str], bytes]
MEASURED = {"f16", "bf16", "f32", "f64"}
COMPLEX = {"c64", "c128"}
# Dtypes that a writer may measure (statistics 3.4).
MEASURABLE = MEASURED | COMPLEX | {"f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "f8_e8m0"}
COUNTS = ("nan", "positive_infinity", "negative_infinity", "zero", "subnormal")
# Columns of statistics: type, and whether there may be nulls (statistics 1.1).
STATISTICS_COLUMNS = {
    "tensor": ("text", False), "role": ("text", False), "dtype": ("text", False), "shard_offset": ("list", False),
    "shard_shape": ("list", False), "chunk": ("number", False), "elements": ("number", False),
    **{name: ("number", True) for name in COUNTS},
    "min": ("float", True), "max": ("float", True), "sum": ("float", True), "sum_squares": ("float", True), "exponents": ("list", True),
    "reference_step": ("number", True), "changed": ("number", True), "change_squares": ("float", True), "change_ulps": ("number", True),
}  # fmt: skip


def check_reserved(blobs: Blobs, tensors: set[str]) -> None:
    """Checks all such blobs of a snapshot, and that the trees of its ranks are parts of one state."""
    merged = None
    for (rank, name), data in sorted(blobs.items()):
        if name == TREE:
            tree = read_tree(data, rank, blobs, tensors)
            merged = tree if merged is None else merge(merged, tree)
        elif name == ERRORS:
            check_errors(data)
        elif name == STATISTICS and importlib.util.find_spec("pyarrow") is not None:
            check_statistics(data)
    if merged is not None:
        check_lists(merged)


def read_tree(data: bytes, rank: int, blobs: Blobs, tensors: set[str]) -> Any:
    """The state that a tree tells of (tree 1, 2): containers as `(kind, {key: value})`, the rest as nodes."""
    LIMITS.check("max_blob_bytes", len(data))
    value, _ = unseal(data, "tensorcask-tree")
    check_fields(value, COMMON | {"nodes": lambda nodes: isinstance(nodes, list)}, "tree")
    top: dict[Any, Any] = {}
    open_containers: list[tuple[str, Any, dict[Any, Any]]] = [("top", [None], top)]
    for node in value["nodes"]:
        kind, keys, leaf = read_node(node)
        if kind == "tensor" and leaf[0] not in tensors:
            raise corrupt("tree 2.7", f"no tensor {leaf[0]!r}")
        if kind in ("bytes", "file") and (rank, leaf) not in blobs:
            raise corrupt("tree 2.7", f"no blob {leaf!r} of rank {rank}")
        while open_containers and len(open_containers[-1][1]) == len(open_containers[-1][2]):
            open_containers.pop()
        if not open_containers:
            raise corrupt("tree 2.2", "nodes after the last that is due")
        _, due, values = open_containers[-1]
        found = (kind, {} if keys is not None else leaf)
        values[due[len(values)]] = found
        if keys:
            open_containers.append((kind, keys, found[1]))
        if len(open_containers) > MAX_DEPTH:
            raise corrupt("tree 2.6", f"nests deeper than {MAX_DEPTH}")
    if any(len(due) != len(values) for _, due, values in open_containers):
        raise corrupt("tree 2.2", "ends before the last node that is due")
    form = {name: value[name] for name in ("format", "version", "must_understand", "may_ignore", "nodes")}
    if json.dumps(form, ensure_ascii=False, separators=(",", ":")).encode() != data[:-73]:
        raise corrupt("tree 1.2", "not the one form of its content")
    return top[None]


def read_node(node: Any) -> tuple[str, Any, Any]:
    """Kind of a node; keys of a container; what else stands in it."""
    if node == "none":
        return "none", None, None
    if not isinstance(node, dict) or len(node) != 1:
        raise corrupt("tree 2", f"a node {node!r:.50}")
    ((kind, value),) = node.items()
    if kind == "dict" and isinstance(value, list):
        keys = [read_key(key) for key in value]
        if len(set(keys)) != len(keys):
            raise corrupt("tree 2.3", "a key stands twice")
        return kind, keys, None
    if kind == "part" and isinstance(value, list) and all(map(is_number, value)):
        if any(a >= b for a, b in zip(value, value[1:], strict=False)):
            raise corrupt("tree 3.1", "positions do not ascend")
        return kind, value, None
    if kind == "typed" and is_text(value):
        # The next node is the value. Programs that have the type make it from the value (tree 2.8).
        return kind, range(1), None
    if kind in ("list", "tuple") and is_number(value):
        # More than Python counts to is more than there are nodes, too.
        return kind, range(min(value, 1 << 62)), None
    if kind == "int" and is_text(value) and not INTEGER.fullmatch(value):
        raise corrupt("tree 2.4", f"an integer {value:.50}")
    if kind == "float" and is_text(value) and not FLOAT.fullmatch(value):
        raise corrupt("tree 2.5", f"a float {value:.50}")
    if kind in ("str", "int", "float", "bytes", "file") and is_text(value):
        return kind, None, value
    if kind == "bool" and isinstance(value, bool):
        return kind, None, value
    if kind == "tensor" and isinstance(value, list) and len(value) == 2 and all(map(is_text, value)):
        return kind, None, value
    raise corrupt("tree 2", f"a node {kind!r:.50}")


def read_key(key: Any) -> tuple[str, str]:
    if not isinstance(key, dict) or len(key) != 1:
        raise corrupt("tree 2.1", "a key")
    ((kind, text),) = key.items()
    if kind not in ("str", "int") or not is_text(text):
        raise corrupt("tree 2.1", "a key")
    if kind == "int" and not INTEGER.fullmatch(text):
        raise corrupt("tree 2.4", f"an integer {text:.50}")
    return kind, text


def merge(one: Any, other: Any) -> Any:
    """One state from the trees of two ranks (tree 3)."""
    if one[0] == other[0] and one[0] in ("dict", "part"):
        merged = dict(one[1])
        for key, value in other[1].items():
            merged[key] = merge(merged[key], value) if key in merged else value
        return one[0], merged
    # That of the lower rank (tree 3.2).
    return one


def check_lists(tree: Any) -> None:
    """Each part of a list is whole once all are merged (tree 3.3)."""
    rest = [tree]
    while rest:
        kind, value = rest.pop()
        if kind == "part" and sorted(value) != list(range(len(value))):
            raise corrupt("tree 3.3", "a list with a gap")
        if kind in ("dict", "list", "tuple", "part"):
            rest.extend(value.values())


def check_errors(data: bytes) -> None:
    """A receipt of what was rounded (errors 1 to 3)."""
    LIMITS.check("max_blob_bytes", len(data))
    value, _ = unseal(data, "tensorcask-errors")
    check_fields(value, COMMON | {"shards": lambda shards: isinstance(shards, list)}, "receipt")
    places = []
    for shard in value["shards"]:
        is_numbers = lambda numbers: isinstance(numbers, list) and all(map(is_number, numbers))  # noqa: E731
        is_list = lambda chunks: isinstance(chunks, list)  # noqa: E731
        check_fields(shard, {"tensor": is_text, "offset": is_numbers, "shape": is_numbers, "setting": is_text, "chunks": is_list}, "shard")
        places.append((shard["tensor"].encode(), shard["offset"], shard["shape"]))
        for chunk in shard["chunks"]:
            if not isinstance(chunk, list) or len(chunk) != 8 or not all(is_number(chunk[at]) for at in (0, 1, 5)):
                raise corrupt("errors 3", "a chunk")
            if not all(type(x) in (int, float) and isfinite(x) and x >= 0 for x in chunk):
                raise corrupt("errors 3.3", "an error that is no number, or negative")
        numbers = [chunk[0] for chunk in shard["chunks"]]
        if any(a >= b for a, b in zip(numbers, numbers[1:], strict=False)):
            raise corrupt("errors 2", "chunks are not in order")
    if any(a >= b for a, b in zip(places, places[1:], strict=False)):
        raise corrupt("errors 1", "shards are not in order")


def check_statistics(data: bytes) -> None:
    """Statistics of chunks (statistics 1 to 4)."""
    last: Any = None
    for row in read_statistics(data):
        dtype = next((dtype for dtype in DTYPES.values() if dtype.name == row["dtype"]), None)
        shape = tuple(row["shard_shape"])
        if dtype is None:
            raise corrupt("statistics 1.1", f"a dtype {row['dtype']!r:.50}")
        place = (row["tensor"].encode(), row["shard_offset"], row["shard_shape"], row["chunk"])
        if last is not None and last >= place:
            raise corrupt("statistics 2", "rows are not in order")
        last = place
        if len(row["shard_offset"]) != len(shape) or row["chunk"] >= chunk_count(dtype, shape):
            raise corrupt("statistics 2.2", "a chunk that the shard does not have")
        if row["elements"] != elements_of_chunk(dtype, shape, row["chunk"]):
            raise corrupt("statistics 2.2", "another number of elements")
        check_values(row)


def read_statistics(data: bytes) -> list[dict[str, Any]]:
    """The rows of a table of exactly these columns (statistics 1.1)."""
    # Only now: it takes longer to load than most stores to read.
    import pyarrow as pa
    import pyarrow.parquet as pq

    LIMITS.check("max_blob_bytes", len(data))
    types = {"text": pa.types.is_string, "number": pa.types.is_uint64, "float": pa.types.is_float64}
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        LIMITS.check("max_shards", file.metadata.num_rows)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        if {group.column(i).compression for group in groups for i in range(group.num_columns)} - {"UNCOMPRESSED", "SNAPPY"}:
            raise corrupt("statistics 1.1", "another compression")
        # One thread: those of pyarrow may outlive the interpreter, which then aborts.
        table = file.read(use_threads=False)
    except (ValueError, OSError, pa.ArrowException):
        raise corrupt("statistics 1", "no Parquet table") from None
    if table.column_names != list(STATISTICS_COLUMNS):
        raise corrupt("statistics 1.1", "other columns")
    for name, (kind, nullable) in STATISTICS_COLUMNS.items():
        found = table.schema.field(name).type
        if not (pa.types.is_list(found) and pa.types.is_uint64(found.value_type) if kind == "list" else types[kind](found)):
            raise corrupt("statistics 1.1", f"type of column {name}")
        if not nullable and table[name].null_count:
            raise corrupt("statistics 1.1", f"null in column {name}")
    rows = table.to_pylist()
    if any(None in row[name] for row in rows for name in ("shard_offset", "shard_shape", "exponents") if row[name] is not None):
        raise corrupt("statistics 1.1", "null in a list")
    return rows


def check_values(row: dict[str, Any]) -> None:
    """statistics 3, 4"""
    floats = ("min", "max", "sum", "sum_squares")
    present = [row[name] is not None for name in (*COUNTS, "exponents")]
    is_measured = any(present) or any(row[name] is not None for name in floats)
    numbers = row["elements"] * (2 if row["dtype"] in COMPLEX else 1)
    if (is_measured or row["dtype"] in MEASURED) and not all(present):
        raise corrupt("statistics 3", "values of a float are missing")
    if is_measured and row["dtype"] not in MEASURABLE:
        raise corrupt("statistics 3", "values of a type that has none")
    if any(row[name] is not None and not isfinite(row[name]) for name in (*floats, "change_squares")):
        raise corrupt("statistics 3", "a number that is not finite")
    if is_measured:
        if len(row["exponents"]) != 16 or sum(row["exponents"]) > -(-numbers // 16):
            raise corrupt("statistics 3.3", "exponents")
        if sum(row[name] for name in COUNTS) > numbers:
            raise corrupt("statistics 3", "counts beyond the number of elements")
        if (row["min"] is None) != (row["max"] is None) or (row["min"] is not None and row["min"] > row["max"]):
            raise corrupt("statistics 3.1", "a minimum above the maximum")
    change = [row[name] is not None for name in ("reference_step", "changed", "change_ulps")]
    if any(change) != all(change) or (row["change_squares"] is not None and not all(change)):
        raise corrupt("statistics 4", "a part of a change")
    if row["changed"] is not None and row["changed"] > numbers:
        raise corrupt("statistics 4", "more changed elements than there are")
