"""Snapshots, their chains, and how base and deltas give a tensor (chain, manifest 4 and 5)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from struct import pack
from typing import Any
from zlib import crc32

import numpy as np

from .cask import Cask
from .codecs import Bytes, Codec, Partner
from .columns import Shard, Tensor
from .dtypes import chunk_count, elements
from .errors import LIMITS, corrupt
from .log import Record, entry_path, inline_parts
from .manifest import Directory, parse_manifest, read_directory, read_manifest
from .reserved import check_reserved
from .sealed import inside


@dataclass
class Snapshot:
    """A link: log record, manifest, directory, casks by slot."""

    record: Record
    manifest: dict[str, Any]
    directory: Directory
    parent: "Snapshot | None"
    casks: dict[int, Cask] = field(default_factory=dict)
    depth: int = 1
    whole: bool = True

    def chain(self) -> Iterator["Snapshot"]:
        link: Snapshot | None = self
        while link is not None:
            yield link
            link = link.parent


class Snapshots:
    """Opens snapshots in the order in which they were added, collected ones left out (log 4.1); checks each against log, parent,
    directory and casks. One that is not live may need a collected one: then its chain is not whole, and not read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.by_id: dict[str, Snapshot] = {}
        self._directories: dict[str, Directory] = {}
        self._casks: dict[str, Cask] = {}

    def open(self, record: Record) -> Snapshot:
        held: bytes | None = None
        if record.inline is None:
            path = self.root / "snapshots" / record.manifest_name()
            manifest = read_manifest(path, record.manifest)
        else:
            path = entry_path(self.root, record.sequence)
            with inside(path):
                data, held = inline_parts(self.root, record)
                manifest = parse_manifest(data, record.manifest)
                if len(held) != sum(row["bytes"] for row in manifest["casks"]):
                    raise corrupt("log 3.7", "the entry does not end with the last cask")
        named = manifest["parent"]
        if (manifest["id"], manifest["step"], named and named["snapshot"]) != (record.id, record.step, record.parent):
            raise corrupt("chain 2.3", f"id, step or parent of {path.name} is not that of its entry")
        if record.roles is not None and not manifest["content"].keys() <= set(record.roles):
            raise corrupt("chain 2.3", f"{path.name} has roles that the log says it has lost")
        parent = self.by_id.get(record.parent) if record.parent else None
        whole = parent.whole if parent else record.parent is None
        live = record.status == "live"
        if live and not whole:
            raise corrupt("chain 2.8", f"the chain of {path.name} needs a snapshot that was collected")
        if parent and any(named["content"].get(role) != digest for role, digest in parent.manifest["content"].items()):
            raise corrupt("chain 2.4", f"{path.name} was made on other content than its parent has")
        digest = manifest["directory"]
        if digest not in self._directories:
            self._directories[digest] = read_directory(self.root / "directories" / digest)
        snapshot = Snapshot(record, manifest, self._directories[digest], parent, depth=parent.depth + 1 if parent else 1, whole=whole)
        LIMITS.check("max_chain_depth", snapshot.depth)
        with inside(path):
            if manifest["tensor_bytes"] != snapshot.directory.tensor_bytes():
                raise corrupt("manifest 2.4", "tensor_bytes is not what the directory gives")
            if manifest["content"].keys() != snapshot.directory.used_roles():
                raise corrupt("manifest 4.2", "roles of content are not those of the directory")
            for row in manifest["casks"]:
                if held is None:
                    self._cask(snapshot, row, self.root / "casks" / f"{row['id']}.cask", None)
                else:
                    self._cask(snapshot, row, path, held[: row["bytes"]])
                    held = held[row["bytes"]:]
            # Of one that is not live, the roles that its chain has lost may be gone (chain 2.9).
            judged = whole and (live or all(has_roles(link.record, record) for link in snapshot.chain()))
            if judged and (content := content_digests(snapshot)) != manifest["content"]:
                raise corrupt("manifest 4", f"content digests are {content}")
        self.by_id[record.id] = snapshot
        return snapshot

    def _cask(self, snapshot: Snapshot, row: dict[str, Any], path: Path, held: bytes | None) -> None:
        """manifest 2.3, 5.2 to 5.4, chain 3.2, 3.3; `held` is the cask, if an entry holds it"""
        if not path.exists():
            raise corrupt("manifest 2.3", f"{path.name} is missing")
        if held is None and path.stat().st_size != row["bytes"]:
            raise corrupt("manifest 2.3", f"{path.name} does not have {row['bytes']} bytes")
        with inside(path):
            if row["id"] not in self._casks:
                cask = Cask(path, bytes.fromhex(row["id"]), held)
                cask.verify()
                self._casks[row["id"]] = cask
        cask = self._casks[row["id"]]
        if (cask.index_offset, cask.root_offset, cask.digest.hex()) != (row["index_offset"], row["root_offset"], row["digest"]):
            raise corrupt("manifest 2.3", f"offsets or digest of {path.name}")
        slot, layout = row["slot"], snapshot.directory.layout
        for key, at in cask.layout.rows.items():
            place = layout.rows.get(key)
            # A shard that the directory places in another slot is a replica.
            if place is None:
                raise corrupt("manifest 5.2", f"{path.name} holds a shard of {key[0]!r} that the directory does not list")
            check_same(cask.layout.tensors[cask.layout.shards[at].tensor], layout.tensors[layout.shards[place].tensor], "chain 3.2")
            if snapshot.record.parent is None and any(chunk.kind != "absolute" for chunk in cask.chunks[at]):
                raise corrupt("chain 3.3", f"{path.name} of a base has a chunk that is not absolute")
        if any(rank != slot // 2 or slot % 2 == 0 for rank, _, _ in cask.blobs):
            raise corrupt("manifest 5.4", f"{path.name} has blobs that do not belong in slot {slot}")
        snapshot.casks[slot] = cask


def check_same(one: Tensor, other: Tensor, clause: str) -> None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        raise corrupt(clause, f"{one.name!r} has another dtype or shape there")


def links(snapshot: Snapshot, tensor: Tensor, shard: Shard) -> Iterator[tuple[Snapshot, Cask, int]]:
    """The casks that hold a shard, newest first, with their snapshots and its row (chain 3, 3.1)."""
    key = (tensor.name, shard.offset, shard.shape)
    for link in snapshot.chain():
        layout = link.directory.layout
        if key not in layout.rows:
            raise corrupt("chain 3.1", f"{link.record.id} lacks a shard of {tensor.name!r}")
        place = layout.rows[key]
        check_same(layout.tensors[layout.shards[place].tensor], tensor, "chain 3.1")
        cask = link.casks.get(link.directory.slots[place])
        if cask and key in cask.layout.rows:
            yield link, cask, cask.layout.rows[key]
    raise corrupt("chain 3.1", f"no absolute chunk for a shard of {tensor.name!r}")


def has_roles(parent: Record, child: Record) -> bool:
    """Whether the parent was not reduced, or to no less than the child (log 4.7)."""
    return parent.roles is None or child.roles is not None and set(child.roles) <= set(parent.roles)


def content_digests(snapshot: Snapshot) -> dict[str, str]:
    """manifest 4.1, from the decoded checksums in the indexes."""
    directory = snapshot.directory
    layout = directory.layout
    hashes = {role: sha256() for role in directory.used_roles()}
    for row, tensor in enumerate(layout.tensors):
        digest = hashes[directory.roles[directory.tensor_roles[row]]]
        digest.update(pack("<I", len(tensor.name)) + tensor.name)
        if directory.is_alias(row):
            target = layout.tensors[directory.aliases[row]].name
            digest.update(pack("<BI", 0, len(target)) + target)
            continue
        shards, rank = directory.shards_of[row], len(tensor.shape)
        digest.update(pack(f"<BI{rank}QI", tensor.dtype.code, rank, *tensor.shape, len(shards)))
        for shard in (layout.shards[i] for i in shards):
            digest.update(pack(f"<{2 * rank}Q", *shard.offset, *shard.shape))
            if elements(shard.shape):
                _, cask, at = next(links(snapshot, tensor, shard))
                digest.update(np.array([chunk.crc for chunk in cask.chunks[at]], "<u4").tobytes())
    return {role: digest.hexdigest() for role, digest in hashes.items()}


def chunk(snapshot: Snapshot, tensor: Tensor, shard: Shard, number: int) -> Bytes:
    """chain 3 for one chunk"""
    steps: list[tuple[Snapshot, Cask, int]] = []
    crc = None
    for link, cask, row in links(snapshot, tensor, shard):
        found = cask.chunks[row][number]
        crc = found.crc if crc is None else crc
        if found.kind != "unchanged":
            steps.append((link, cask, row))
        if found.kind == "absolute":
            break
    data: Bytes | None = None
    for link, cask, row in reversed(steps):
        found = cask.chunks[row][number]
        cask.check_codec(cask.layout.shards[row], found)
        codec = cask.codec(found)
        data = cask.decode(row, number, data, list(partners(link, tensor, shard, number, codec, found.kind == "delta")))
    if data is None or crc32(data) != crc:
        raise corrupt("chain 3.4", f"chunk {number} of {tensor.name!r} decodes to other bytes")
    return data


def partners(link: Snapshot, tensor: Tensor, shard: Shard, number: int, codec: Codec, delta: bool) -> Iterator[Partner]:
    """The chunks of other tensors that a chunk of a link is decoded with (codecs 5, 5.1)."""
    directory = link.directory
    role = directory.role(row_of(directory, tensor))
    if codec.needs and role not in codec.needs:
        raise corrupt("codecs 5.2", f"{tensor.name!r} has role {role}, which has no partners")
    for needed in codec.needs.get(role, ()):
        partner, where = partner_of(directory, tensor, shard, needed)
        before = None
        if delta and link.parent and role not in codec.now_only:
            other, place = partner_of(link.parent.directory, tensor, shard, needed)
            if other.dtype != partner.dtype:
                raise corrupt("codecs 5.2", f"the partner of {tensor.name!r} was of another dtype")
            before = chunk(link.parent, other, place, number)
        given = gradients_of(link, partner, where, number) if needed in codec.gradients else None
        yield partner.dtype, chunk(link, partner, where, number), before, given


def gradients_of(link: Snapshot, tensor: Tensor, shard: Shard, number: int) -> Bytes:
    """The gradients that the chunk of a link itself defines (codecs 5.4)."""
    _, cask, row = next(links(link, tensor, shard))
    found = cask.chunks[row][number]
    if cask is not link.casks.get(link.directory.slots[link.directory.layout.rows[tensor.name, shard.offset, shard.shape]]):
        raise corrupt("codecs 5.4", f"{tensor.name!r} holds no gradients of this step")
    if found.kind != "delta" or link.parent is None:
        raise corrupt("codecs 5.4", f"{tensor.name!r} holds no gradients of this step")
    return cask.gradients(row, number, chunk(link.parent, tensor, shard, number))


def row_of(directory: Directory, tensor: Tensor) -> int:
    return next(row for row, other in enumerate(directory.layout.tensors) if other.name == tensor.name)


def partner_of(directory: Directory, tensor: Tensor, shard: Shard, role: str) -> tuple[Tensor, Shard]:
    layout, at = directory.layout, row_of(directory, tensor)
    found = [
        row for row in range(len(layout.tensors))
        if directory.role(row) == role and directory.params[row] == directory.params[at] and not directory.is_alias(row)
    ]
    partner = layout.tensors[found[0]] if len(found) == 1 and found[0] != at else None
    key = partner and (partner.name, shard.offset, shard.shape)
    if partner is None or partner.shape != tensor.shape or min(partner.dtype.bits, tensor.dtype.bits) < 8 or key not in layout.rows:
        raise corrupt("codecs 5.2", f"{tensor.name!r} has no partner of role {role}")
    return partner, layout.shards[layout.rows[key]]


def shard_bytes(snapshot: Snapshot, tensor: Tensor, shard: Shard) -> Iterator[Bytes]:
    for number in range(chunk_count(tensor.dtype, shard.shape)):
        yield chunk(snapshot, tensor, shard, number)


def tensor_bytes(snapshot: Snapshot, row: int) -> Iterator[Bytes]:
    """The bytes of a tensor, piece by piece; put together in memory only if it is cut (chain 3.5)."""
    directory = snapshot.directory
    row = directory.aliases[row] if directory.is_alias(row) else row
    tensor = directory.layout.tensors[row]
    shards = [directory.layout.shards[i] for i in directory.shards_of[row]]
    if len(shards) == 1:
        yield from shard_bytes(snapshot, tensor, shards[0])
    elif elements(tensor.shape):
        yield _assemble(snapshot, tensor, shards)


def _assemble(snapshot: Snapshot, tensor: Tensor, shards: list[Shard]) -> Bytes:
    """Elements below 8 bits are taken apart into one byte per bit."""
    bits = tensor.dtype.bits
    item = f"V{bits // 8 if bits >= 8 else bits}"
    LIMITS.check("max_read_bytes", elements(tensor.shape) * int(item[1:]))
    whole = np.zeros(tensor.shape, item)
    for shard in shards:
        n = elements(shard.shape)
        if n == 0:
            continue
        data = np.concatenate(list(shard_bytes(snapshot, tensor, shard)))
        if bits < 8:
            data = np.unpackbits(data, bitorder="little")[: n * bits]
        place: tuple[slice, ...] = tuple(slice(o, o + e) for o, e in zip(shard.offset, shard.shape))
        whole[place] = data.view(item).reshape(shard.shape)
    flat = whole.reshape(-1).view(np.uint8)
    return flat if bits >= 8 else np.packbits(flat, bitorder="little")


def read_step(snapshot: Snapshot) -> dict[str, Any]:
    """What an adapter says of a live step."""
    directory, tensors = snapshot.directory, {}
    for row, tensor in enumerate(directory.layout.tensors):
        facts: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
        facts |= {"role": directory.roles[directory.tensor_roles[row]], "param": directory.params[row]}
        digest = sha256()
        for data in tensor_bytes(snapshot, row):
            digest.update(data)
        tensors[tensor.name.decode()] = facts | {"sha256": digest.hexdigest()}
    blobs: list[dict[str, Any]] = []
    reserved: dict[tuple[int, str], bytes] = {}
    for cask in (snapshot.casks[slot] for slot in sorted(snapshot.casks)):
        for rank, name, page in cask.blobs:
            data = bytes(cask.page(page))
            blobs.append({"rank": rank, "name": name.decode(), "sha256": sha256(data).hexdigest()})
            reserved[rank, name.decode()] = data
    check_reserved(reserved, set(tensors))
    return {"tensors": tensors, "blobs": blobs, "metadata": snapshot.manifest["metadata"], "user": snapshot.manifest["user"]}
