"""The vectors of spec/vectors, table by table."""

import sys
import tempfile
import tomllib
import unittest
from pathlib import Path
from zlib import crc32

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tensorcask_reference.cask import Cask  # noqa: E402
from tensorcask_reference.codecs import Partner, codec_of, gradients  # noqa: E402
from tensorcask_reference.dtypes import DTYPES, chunk_count, chunk_elements, elements, elements_of_chunk  # noqa: E402
from tensorcask_reference.entropy import decode_plane  # noqa: E402
from tensorcask_reference.errors import Reject  # noqa: E402
from tensorcask_reference.log import State, parse_entry, parse_store_file  # noqa: E402
from tensorcask_reference.manifest import parse_directory, parse_manifest, parse_receipt  # noqa: E402
from tensorcask_reference.sealed import unseal  # noqa: E402

VECTORS = HERE.parents[2] / "spec" / "vectors"
BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}


def vectors(name: str) -> dict[str, list[dict]]:
    return tomllib.loads((VECTORS / f"{name}.toml").read_text())


def by_name(rows: list[dict]) -> dict[str, bytes]:
    return {row["name"]: bytes.fromhex(row["hex"]) for row in rows}


def patched(data: bytes, row: dict) -> bytes:
    data = bytearray(bytes.fromhex(row["hex"]) if "hex" in row else data)
    for patch in row.get("patch", []):
        new = bytes.fromhex(patch["hex"])
        data[patch["at"]:patch["at"] + len(new)] = new
    return bytes(data[:row.get("keep", len(data))])


def bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), np.uint8)


def repeated(pairs: list) -> np.ndarray:
    return bytes_of("".join(text * times for text, times in pairs))


class Vectors(unittest.TestCase):
    def cask(self, data: bytes) -> Cask:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "input.cask"
            path.write_bytes(data)
            cask = Cask(path)
            cask.verify()
            return cask

    def rejects(self, row: dict, read) -> None:
        """The kind is what counts; which of several clauses is named is a reader's own."""
        with self.subTest(row.get("name"), clause=row.get("clause")):
            with self.assertRaises(Reject) as raised:
                read()
            self.assertEqual(raised.exception.kind, row["kind"].removesuffix("_exceeded"))

    def decode(self, row: dict) -> np.ndarray:
        codec = codec_of(row["codec"], row.get("version", 1))
        columns = [(name, bytes_of(text)) for name, text in row["columns"]]
        codec.check(row["codec"], "delta" if "base" in row else "absolute", BY_NAME[row["dtype"]], [name for name, _ in columns])
        base = bytes_of(row["base"]) if "base" in row else None
        partners: list[Partner] = []
        for partner in row.get("partners", []):
            dtype, before = BY_NAME[partner["dtype"]], bytes_of(partner["base"]) if "base" in partner else None
            given = None
            if "columns" in partner:
                pages = [(name, bytes_of(text)) for name, text in partner["columns"]]
                given = gradients(partner["codec"], dtype, row["elements"], pages, before)
            partners.append((dtype, bytes_of(partner["data"]), before, given))
        return codec.decode(BY_NAME[row["dtype"]], row["elements"], columns, base, partners)

    def test_codecs(self) -> None:
        tables = vectors("codecs")
        for row in tables["chunk"] + tables["chunk_decode"]:
            with self.subTest(row["codec"], data=row["data"]):
                data = self.decode(row).tobytes()
                self.assertEqual((data.hex(), crc32(data)), ("".join(row["data"].split()), row["crc"]))
        for row in tables["chunk_invalid"]:
            self.rejects(row, lambda: self.decode(row))

    def test_entropy(self) -> None:
        tables = vectors("entropy")
        for row in tables["plane"]:
            with self.subTest(row["name"]):
                symbols = repeated(row["symbols"])
                self.assertEqual(decode_plane(repeated(row["code"]), symbols.size).tobytes(), symbols.tobytes())
        for row in tables["plane_invalid"]:
            self.rejects(row, lambda: decode_plane(repeated(row["code"]), row["count"]))

    def test_grid(self) -> None:
        for row in vectors("container")["grid"]:
            dtype, shape = BY_NAME[row["dtype"]], tuple(row["shape"])
            chunks = chunk_count(dtype, shape)
            last = dtype.size(elements_of_chunk(dtype, shape, chunks - 1)) if chunks else 0
            found = elements(shape), chunk_elements(dtype, shape), chunks, last
            self.assertEqual(found, tuple(int(row[key]) for key in ("elements", "chunk_elements", "chunks", "last_chunk_bytes")), row)

    def test_casks(self) -> None:
        tables = vectors("container")
        casks = by_name(tables["cask"])
        for row in tables["cask"] + tables["cask_extended"]:
            self.assertEqual(self.cask(bytes.fromhex(row["hex"])).digest.hex(), row["digest"])
        for row in tables["cask_invalid"]:
            self.rejects(row, lambda: self.cask(patched(casks[row["cask"]], row)))
        for row in tables["header_invalid"]:
            self.rejects(row, lambda: self.cask(bytes.fromhex(row["hex"]) + casks["small"][32:]))

    def test_postscripts(self) -> None:
        tables = vectors("container")
        for row in tables["postscript"] + tables["postscript_invalid"]:
            cask = Cask.__new__(Cask)
            cask.id, cask.size = bytes.fromhex(row["id"]), row["file_bytes"]
            if "kind" in row:
                self.rejects(row, lambda: cask._postscript(bytes.fromhex(row["hex"])))
            else:
                cask._postscript(bytes.fromhex(row["hex"]))
                self.assertEqual((cask.root_offset, cask.root_crc), (row["root_offset"], row["root_crc"]))
                self.assertEqual((cask.alignment, cask.may_ignore), (1 << row["alignment_exponent"], row["may_ignore"]))

    def test_directories(self) -> None:
        tables = vectors("manifest")
        directories = by_name(tables["directory"])
        for row in tables["directory"]:
            directory = parse_directory(directories[row["name"]], row["digest"])
            self.assertEqual([t.name.decode() for t in directory.layout.tensors], [t["name"] for t in row["tensors"]])
            self.assertEqual(directory.slots, [s["slot"] for t in row["tensors"] for s in t["shards"]])
        for row in tables["directory_invalid"]:
            self.rejects(row, lambda: parse_directory(patched(directories[row["directory"]], row), row["digest"]))

    def test_manifests(self) -> None:
        tables = vectors("manifest")
        for row in tables["manifest"]:
            parse_manifest(row["text"].encode(), row["digest"])
        for row in tables["manifest_invalid"]:
            self.rejects(row, lambda: parse_manifest(row["text"].encode(), None))

    def test_receipts(self) -> None:
        tables = vectors("manifest")
        for row in tables["receipt"]:
            parse_receipt(row["text"].encode())
        for row in tables["receipt_invalid"]:
            self.rejects(row, lambda: parse_receipt(row["text"].encode()))

    def test_messages_of_a_session(self) -> None:
        for row in vectors("session")["message"]:
            body, _ = unseal(row["text"].encode(), "tensorcask-" + row["name"].split()[0])
            self.assertEqual(body["version"], "1.0")

    def test_log(self) -> None:
        tables = vectors("log")
        for row in tables["store_file"]:
            parse_store_file(row["text"].encode())
        for row in tables["store_file_invalid"]:
            self.rejects(row, lambda: parse_store_file(row["text"].encode()))
        state = State()
        for row in tables["entry"]:
            state.apply(*parse_entry(row["text"].encode()))
            self.assertEqual((state.sequence, state.digest), (row["sequence"], row["digest"]))
        for row in tables["entry_alone"]:
            self.assertEqual(parse_entry(row["text"].encode())[1], row["digest"])
        for row in tables["entry_inline"]:
            entry, digest = parse_entry(row["text"].encode())
            held = row["text"].encode()[-entry["event"]["inline"] :]
            self.assertEqual((digest, entry["event"]["manifest"]), (row["digest"], row["manifest"]))
            parse_manifest(held, row["manifest"])
        for row in tables["entry_invalid"]:
            alone = State(int(row["sequence"]) - 1, state.digest if row["sequence"] > 1 else None)
            self.rejects(row, lambda: alone.apply(*parse_entry(row["text"].encode())))


if __name__ == "__main__":
    unittest.main()
