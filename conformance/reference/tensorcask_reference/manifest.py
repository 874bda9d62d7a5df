"""Manifests and directories (manifest 1 to 3)."""

import struct
from collections import defaultdict
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from .columns import Columns, Layout, Shard, Tensor, ascends, read_layout
from .dtypes import elements
from .errors import check_features, check_version, corrupt, unsupported
from .sealed import (
    COMMON,
    Fields,
    check_fields,
    inside,
    is_digest,
    is_id,
    is_number,
    is_object,
    is_text,
    one_of,
    or_null,
    read_object,
    unseal,
)

NO_ALIAS = (1 << 32) - 1
MAX_SPLIT_DIMENSIONS = 8


def is_content(value: Any) -> bool:
    return is_object(value) and all(map(is_digest, value.values()))


def is_u32(value: Any) -> bool:
    return is_number(value) and value < 1 << 32


def is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


MANIFEST: Fields = COMMON | {
    "id": is_id, "step": is_number, "kind": one_of("base", "delta"), "parent": or_null(is_object), "directory": is_digest,
    "content": is_content, "casks": lambda value: isinstance(value, list), "tensor_bytes": is_number, "time_ms": is_number,
    "metadata": lambda value: is_object(value) and all(map(is_text, value.values())), "user": is_object,
}
PARENT: Fields = {"snapshot": is_id, "content": is_content}
CASK: Fields = {
    "slot": is_u32, "id": is_id, "bytes": is_number, "index_offset": is_number,
    "root_offset": is_number, "digest": is_digest,
}


RECEIPT: Fields = COMMON | {
    "step": is_number, "attempt": is_number, "rank": is_u32, "world": is_u32, "parent": or_null(is_object),
    "casks": lambda value: isinstance(value, list), "tensors": lambda value: isinstance(value, list),
    "finite": or_null(lambda value: isinstance(value, bool)), "encode_us": or_null(is_number), "upload_us": or_null(is_number),
}
RECEIPT_TENSOR: Fields = {
    "name": is_text, "dtype": is_text, "shape": is_numbers, "role": is_text, "param": is_text, "alias_of": or_null(is_text), "slot": is_u32,
    "shards": lambda value: isinstance(value, list),
}
RECEIPT_SHARD: Fields = {"offset": is_numbers, "shape": is_numbers, "crcs": is_text}


def read_manifest(path: Path, digest: str) -> dict[str, Any]:
    """Reads a manifest and checks that it agrees with itself (manifest 1 to 2.3)."""
    data = read_object(path, "max_manifest_bytes", "manifest 1")
    with inside(path):
        return parse_manifest(data, digest)


def parse_manifest(data: bytes, expected: str | None) -> dict[str, Any]:
    value, digest = unseal(data, "tensorcask-snapshot")
    if expected not in (None, digest):
        raise corrupt("manifest 1", f"digest {digest}, where the log names {expected}")
    check_fields(value, MANIFEST, "a manifest")
    if (value["kind"] == "delta") != (value["parent"] is not None):
        raise corrupt("manifest 2.1", f"parent of a {value['kind']}")
    if value["parent"] is not None:
        check_fields(value["parent"], PARENT, "a parent")
    for cask in value["casks"]:
        check_fields(cask, CASK, "a cask")
        index, root = cask["index_offset"], cask["root_offset"]
        if not 32 <= index <= root <= cask["bytes"] - 96 or index % 64 or root % 64:
            raise corrupt("manifest 2.3", f"offsets of the cask in slot {cask['slot']}")
    if not ascends([cask["slot"] for cask in value["casks"]]):
        raise corrupt("manifest 2.2", "slots do not ascend")
    return value


def parse_receipt(data: bytes) -> dict[str, Any]:
    """manifest 6"""
    value, _ = unseal(data, "tensorcask-receipt")
    check_fields(value, RECEIPT, "a receipt")
    if value["parent"] is not None:
        check_fields(value["parent"], PARENT, "a parent")
    for cask in value["casks"]:
        check_fields(cask, CASK, "a cask")
    for tensor in value["tensors"]:
        check_fields(tensor, RECEIPT_TENSOR, "a tensor of a receipt")
        for shard in tensor["shards"]:
            check_fields(shard, RECEIPT_SHARD, "a shard of a receipt")
    return value


@dataclass(frozen=True)
class Directory:
    layout: Layout
    roles: list[str]
    tensor_roles: list[int]
    params: list[str]
    aliases: list[int]
    slots: list[int]
    shards_of: list[list[int]]

    def used_roles(self) -> set[str]:
        return {self.roles[row] for row in self.tensor_roles}

    def role(self, tensor: int) -> str:
        return self.roles[self.tensor_roles[tensor]]

    def is_alias(self, tensor: int) -> bool:
        return self.aliases[tensor] != NO_ALIAS

    def tensor_bytes(self) -> int:
        return sum(t.dtype.size(elements(t.shape)) for row, t in enumerate(self.layout.tensors) if not self.is_alias(row))


def read_directory(path: Path) -> Directory:
    data = read_object(path, "max_directory_bytes", "manifest 3.1")
    with inside(path):
        return parse_directory(data, path.name)


def parse_directory(data: bytes, digest: str) -> Directory:
    """manifest 3"""
    if sha256(data).hexdigest() != digest:
        raise corrupt("manifest 3.1", "digest of a directory")
    columns = Columns(data)
    head = columns.take(1, 128).tobytes()
    magic, major, _, _, must, _, tensors, name_bytes, dimensions, shards, role_rows, role_bytes, param_bytes = struct.unpack_from("<8sHHI9Q", head)
    if magic != b"\x89TCD\r\n\x1a\n":
        raise corrupt("manifest 3.2", "magic of a directory")
    check_version(major, "directory")
    check_features([bit for bit in range(64) if must >> bit & 1], "directory")
    if any(head[12:16]) or any(head[88:]):
        raise corrupt("manifest 3.2", "reserved bytes of a directory")
    layout = read_layout(columns, tensors, name_bytes, dimensions, shards)
    if role_rows > 255:
        raise corrupt("manifest 3.3", f"{role_rows} roles")
    roles = columns.text(role_rows, role_bytes)
    tensor_roles = columns.take(1, tensors).tolist()
    if not ascends(roles) or max(tensor_roles, default=-1) >= role_rows:
        raise corrupt("manifest 3.3", "roles out of order, or a role that is not there")
    params = [text.decode() for text in columns.text(tensors, param_bytes)]
    aliases, slots = columns.take(4, tensors).tolist(), columns.take(4, shards).tolist()
    columns.end()
    shards_of: list[list[int]] = [[] for _ in range(tensors)]
    for row, shard in enumerate(layout.shards):
        shards_of[shard.tensor].append(row)
    directory = Directory(layout, [role.decode() for role in roles], tensor_roles, params, aliases, slots, shards_of)
    for row, tensor in enumerate(layout.tensors):
        if directory.is_alias(row):
            _check_alias(directory, row, tensor)
        else:
            _check_tiling(tensor, [layout.shards[shard] for shard in shards_of[row]])
    return directory


def _check_alias(directory: Directory, row: int, tensor: Tensor) -> None:
    """manifest 3.5"""
    target = directory.aliases[row]
    if directory.shards_of[row] or target >= row or directory.is_alias(target):
        raise corrupt("manifest 3.5", f"alias {tensor.name!r} with shards, to a later tensor or to an alias")
    other = directory.layout.tensors[target]
    if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
        raise corrupt("manifest 3.5", f"alias {tensor.name!r} of other dtype or shape")


def _check_tiling(tensor: Tensor, shards: list[Shard]) -> None:
    """manifest 3.4. Rectangles tile a tensor if the sum of their indicator functions is its own. Such a sum is zero exactly if its
    mixed difference is, which is a sum over corners; taken one dimension after the other, the inner corners cancel early."""
    shape = tensor.shape
    if elements(shape) == 0:
        if len(shards) != 1 or shards[0].shape != shape:
            raise corrupt("manifest 3.4", f"{tensor.name!r} has no elements and not one shard")
        return
    if any(elements(shard.shape) == 0 for shard in shards):
        raise corrupt("manifest 3.4", f"{tensor.name!r} has elements, and a shard without")
    split = [d for d, extent in enumerate(shape) if any(shard.shape[d] != extent for shard in shards)]
    if len(split) > MAX_SPLIT_DIMENSIONS:
        raise unsupported("manifest 3.4", f"{tensor.name!r} is cut in {len(split)} dimensions")
    sums: dict[tuple, int] = defaultdict(int)
    for shard in shards:
        sums[tuple((shard.offset[d], shard.offset[d] + shard.shape[d]) for d in split)] += 1
    sums[tuple((0, shape[d]) for d in split)] -= 1
    for i in range(len(split)):
        corners: dict[tuple, int] = defaultdict(int)
        for key, weight in sums.items():
            if weight:
                corners[*key[:i], key[i][0], *key[i + 1:]] += weight
                corners[*key[:i], key[i][1], *key[i + 1:]] -= weight
        sums = corners
    if any(sums.values()):
        raise corrupt("manifest 3.4", f"the shards of {tensor.name!r} do not tile it")
