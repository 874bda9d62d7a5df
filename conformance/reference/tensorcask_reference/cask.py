"""One cask: header, postscript, index, pages, blobs (container, index)."""

import os
import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np

from .codecs import Bytes, Codec, Column, Partner, codec_of, gradients
from .columns import Columns, Shard, align, ascends, read_layout
from .dtypes import elements_of_chunk
from .errors import LIMITS, Reject, check_features, check_version, corrupt, limit

HEADER, POSTSCRIPT = 32, 96
KINDS = ("unchanged", "absolute", "delta")
NO_COLUMN = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Page:
    """Bytes under a page checksum; a blob is one too (container 5.1)."""

    row: int
    chunk: int
    column: int
    offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Chunk:
    kind: str
    codec: int
    crc: int
    pages: tuple[Page, ...]


class Cask:
    """Opens a cask and checks its index; `verify` reads the rest."""

    def __init__(self, path: Path, id: bytes | None = None, held: bytes | None = None) -> None:
        """`held` is the cask, if the file at `path` is a log entry that holds it (log 3.7)."""
        self.path, self.held = path, held
        self.size = os.stat(path).st_size if held is None else len(held)
        if self.size < HEADER + POSTSCRIPT:
            raise corrupt("container 1", f"{self.size} bytes are no cask")
        header, end = self.read(0, HEADER), self.read(self.size - POSTSCRIPT, POSTSCRIPT)
        if header[:8] != b"\x89TCK\r\n\x1a\n":
            raise corrupt("container 2.1", "magic of the header")
        if crc32(header[:28]) != int.from_bytes(header[28:], "little"):
            raise corrupt("container 2.2", "checksum of the header")
        self.id = header[8:24]
        if id not in (None, self.id):
            raise corrupt("container 2.4", f"id {self.id.hex()} in the cask {id.hex()}")
        self._postscript(end)
        if any(header[24:28]):
            raise corrupt("container 2.3", "reserved bytes of the header")
        LIMITS.check("max_index_bytes", self.size - POSTSCRIPT - self.root_offset)
        root = self.read(self.root_offset, self.size - POSTSCRIPT - self.root_offset)
        if self._index_crc(self.root_offset, root) != self.root_crc:
            raise corrupt("container 3.6", "checksum of the index root")
        self.digest = sha256(header + root + end).digest()
        self._root(Columns(root))
        self._parts()

    def read(self, offset: int, size: int) -> bytes:
        if self.held is not None:
            data = self.held[offset:offset + size]
        else:
            with open(self.path, "rb") as file:
                file.seek(offset)
                data = file.read(size)
        if len(data) != size:
            raise corrupt("container 1", f"{self.path.name} ends before {offset + size}")
        return data

    def _index_crc(self, offset: int, data: bytes) -> int:
        """container 5.3"""
        return crc32(data, crc32(self.id + offset.to_bytes(8, "little")))

    def _postscript(self, end: bytes) -> None:
        """container 3, in the order of 3.7"""
        self.root_offset, self.root_crc, major, _, must, self.may_ignore, exponent = struct.unpack_from("<QIHHQQB", end)
        if end[88:] != b"tck-end\n":
            raise corrupt("container 3.1", "magic of the postscript")
        if crc32(self.id + end[:80]) != int.from_bytes(end[80:84], "little"):
            raise corrupt("container 3.2", "checksum of the postscript")
        check_version(major, "cask")
        check_features([bit for bit in range(64) if must >> bit & 1], "cask")
        if not 6 <= exponent <= 12:
            raise corrupt("container 3.3", f"alignment exponent {exponent}")
        self.alignment = 1 << exponent
        if self.root_offset < HEADER or self.root_offset % 64 or self.root_offset > self.size - POSTSCRIPT:
            raise corrupt("container 3.4", f"root at {self.root_offset}")
        if any(end[33:80]) or any(end[84:88]):
            raise corrupt("container 3.5", "reserved bytes of the postscript")

    def _root(self, columns: Columns) -> None:
        """index 2"""
        head = columns.take(1, 128).tobytes()
        tensors, name_bytes, dimensions, shards, codecs, codec_bytes, column_rows, column_bytes, blobs, blob_name_bytes, \
            self.blobs_offset, self.part_count, extensions = struct.unpack_from("<13Q", head)
        if any(head[104:]):
            raise corrupt("index 2.1", "reserved bytes of the head")
        LIMITS.check("max_blobs", blobs)
        self.layout = read_layout(columns, tensors, name_bytes, dimensions, shards)
        if len({shard.tensor for shard in self.layout.shards}) != tensors:
            raise corrupt("index 3.5", "a tensor without a shard")
        codec_ids = self._dictionary(columns, codecs, codec_bytes)
        self.codecs = list(zip(codec_ids, columns.take(2, codecs).tolist()))
        self.columns = self._dictionary(columns, column_rows, column_bytes)
        ranks = columns.take(4, blobs).tolist()
        names = columns.text(blobs, blob_name_bytes)
        if not ascends(list(zip(ranks, names))):
            raise corrupt("index 2.4", "blobs do not ascend")
        lengths, crcs = columns.take(8, blobs).tolist(), columns.take(4, blobs).tolist()
        self.blobs: list[tuple[int, bytes, Page]] = []
        end = self.blobs_offset
        for row, (rank, name, size, crc) in enumerate(zip(ranks, names, lengths, crcs)):
            offset = align(end, self.alignment)
            end = offset + size
            if end >= 1 << 64:
                raise corrupt("index 2.4", "a blob ends beyond 2^64")
            self.blobs.append((rank, name, Page(row, 0, NO_COLUMN, offset, size, crc)))
        self.index_offset = align(end, 64)
        self.page_starts = columns.take(8, self.part_count).tolist()
        self.page_counts = columns.take(8, self.part_count).tolist()
        self.part_crcs = columns.take(4, self.part_count).tolist()
        features = columns.take(1, extensions).tolist()
        if not ascends(features) or any(f > 63 or not self.may_ignore >> f & 1 for f in features):
            raise corrupt("index 2.5", f"extensions of features {features}")
        for size in columns.take(8, extensions).tolist():
            columns.take(1, size)
        columns.end()

    def _dictionary(self, columns: Columns, rows: int, size: int) -> list[str]:
        """index 2.3"""
        if rows > 255:
            raise corrupt("index 2.3", f"dictionary of {rows} rows")
        texts = columns.text(rows, size)
        if b"" in texts or len(set(texts)) != rows:
            raise corrupt("index 2.3", "empty or repeated name in a dictionary")
        return [text.decode() for text in texts]

    def _runs(self) -> list[list[tuple[int, int]]]:
        """Shards of each part, with their numbers of chunks (index 4.1)."""
        runs: list[list[tuple[int, int]]] = []
        run: list[tuple[int, int]] = []
        chunks = 0
        for row, shard in enumerate(self.layout.shards):
            count = self.layout.chunks(shard)
            run.append((row, count))
            chunks += count
            if chunks >= 1024:
                runs.append(run)
                run, chunks = [], 0
        return runs + [run] if chunks else runs

    def _parts(self) -> None:
        """index 4"""
        runs = self._runs()
        if len(runs) != self.part_count:
            raise corrupt("index 4.1", f"{self.part_count} parts for {len(runs)} runs")
        self.chunks: list[list[Chunk]] = [[] for _ in self.layout.shards]
        at, end = self.index_offset, HEADER
        for run, start, pages, crc in zip(runs, self.page_starts, self.page_counts, self.part_crcs):
            if start != end:
                raise corrupt("index 4.4", f"page start {start} of a part is not {end}")
            chunks = sum(count for _, count in run)
            size = 3 * align(chunks, 64) + align(4 * chunks, 64) + align(pages, 64) + 2 * align(4 * pages, 64)
            if at + size >= 1 << 64:
                raise corrupt("index 4.2", "a part ends beyond 2^64")
            if max(chunks, pages) >= 1 << 32:
                raise limit(f"a part of {chunks} chunks and {pages} pages")
            LIMITS.check("max_index_bytes", size)
            if at + size > self.root_offset:
                raise corrupt("index 4.2", "a part does not fit")
            data = self.read(at, size)
            if self._index_crc(at, data) != crc:
                raise corrupt("index 4.2", "checksum of a part")
            end = self._part(Columns(data), run, chunks, pages, end)
            at += size
        if at != self.root_offset:
            raise corrupt("index 4.2", "parts do not end at the root")
        if end != self.blobs_offset:
            raise corrupt("index 4.4", f"pages end at {end}, blobs begin at {self.blobs_offset}")

    def _part(self, columns: Columns, run: list[tuple[int, int]], chunks: int, pages: int, end: int) -> int:
        """index 4.3; returns where the last page ends (container 4.1)."""
        kinds, codecs, counts = (columns.take(1, chunks).tolist() for _ in range(3))
        crcs = columns.take(4, chunks).tolist()
        page_columns, lengths, page_crcs = columns.take(1, pages).tolist(), columns.take(4, pages).tolist(), columns.take(4, pages).tolist()
        columns.end()
        if max(kinds, default=0) > 2:
            raise corrupt("index 4.3", f"chunk of kind {max(kinds)}")
        if sum(counts) != pages or max(page_columns, default=-1) >= len(self.columns):
            raise corrupt("index 4.3", "page counts or columns")
        at = page = 0
        for row, count in run:
            after_raw = False
            for number in range(count):
                kind, codec = KINDS[kinds[at]], codecs[at]
                if kind == "unchanged" and (codec or counts[at]) or kind != "unchanged" and codec >= len(self.codecs):
                    raise corrupt("index 4.3", f"codec row or pages of a chunk that is {kind}")
                raw = kind == "absolute" and self.codecs[codec][0] == "tc.raw"
                placed = []
                for i in range(counts[at]):
                    start = end if raw and after_raw and i == 0 else align(end, self.alignment)
                    placed.append(Page(row, number, page_columns[page], start, lengths[page], page_crcs[page]))
                    end = start + lengths[page]
                    if end > self.blobs_offset:
                        raise corrupt("index 4.3", "a page ends behind the first blob's beginning")
                    page += 1
                self.chunks[row].append(Chunk(kind, codec, crcs[at], tuple(placed)))
                after_raw = raw
                at += 1
        return end

    def page(self, page: Page) -> bytes:
        """Reads and checks a page or blob (container 5.2)."""
        if page.column == NO_COLUMN:
            LIMITS.check("max_blob_bytes", page.size)
        data = self.read(page.offset, page.size)
        if crc32(data, crc32(self.id + struct.pack("<4Q", page.row, page.chunk, page.column, page.offset))) != page.crc:
            raise corrupt("container 5.2", f"page at {page.offset}")
        return data

    def check_codec(self, shard: Shard, chunk: Chunk) -> None:
        if chunk.kind != "unchanged":
            name, version = self.codecs[chunk.codec]
            dtype = self.layout.tensors[shard.tensor].dtype
            codec_of(name, version).check(name, chunk.kind, dtype, [self.columns[page.column] for page in chunk.pages])

    def codec(self, chunk: Chunk) -> Codec:
        return codec_of(*self.codecs[chunk.codec])

    def decode(self, row: int, number: int, base: Bytes | None, partners: list[Partner] = []) -> Bytes:
        """Decodes an absolute or delta chunk (codecs 4)."""
        chunk, shard = self.chunks[row][number], self.layout.shards[row]
        self.check_codec(shard, chunk)
        dtype = self.layout.tensors[shard.tensor].dtype
        pages: list[Column] = [(self.columns[page.column], np.frombuffer(self.page(page), np.uint8)) for page in chunk.pages]
        return self.codec(chunk).decode(dtype, elements_of_chunk(dtype, shard.shape, number), pages, base, partners)

    def gradients(self, row: int, number: int, base: Bytes) -> Bytes:
        """The gradients that a delta chunk defines (codecs 5.4)."""
        chunk, shard = self.chunks[row][number], self.layout.shards[row]
        self.check_codec(shard, chunk)
        dtype = self.layout.tensors[shard.tensor].dtype
        pages: list[Column] = [(self.columns[page.column], np.frombuffer(self.page(page), np.uint8)) for page in chunk.pages]
        return gradients(self.codecs[chunk.codec][0], dtype, elements_of_chunk(dtype, shard.shape, number), pages, base)

    def _shard(self, row: int, shard: Shard) -> dict:
        """What an adapter says of a shard; checks all absolute chunks."""
        digest, whole, known = sha256(), True, True
        for number, chunk in enumerate(self.chunks[row]):
            try:
                if chunk.kind == "absolute" and not self.codec(chunk).needs:
                    data = self.decode(row, number, None)
                    if crc32(data) != chunk.crc:
                        raise corrupt("container 5.4", f"decoded chunk {number} of shard {row}")
                    digest.update(data)
                else:
                    self.check_codec(shard, chunk)
                    whole = False
            except Reject as reject:
                if reject.kind != "unsupported":
                    raise
                known = False
        result = {"offset": list(shard.offset), "shape": list(shard.shape)}
        return result | ({"sha256": digest.hexdigest() if whole else None} if known else {"error": "unsupported"})

    def verify(self) -> dict:
        """Reads all pages, blobs, padding and absolute chunks, and says what an adapter has to."""
        pages = [page for shard in self.chunks for chunk in shard for page in chunk.pages] + [page for _, _, page in self.blobs]
        ends = [HEADER] + [page.offset + page.size for page in pages]
        starts = [page.offset for page in pages] + [self.index_offset]
        for end, start in zip(ends, starts):
            if start > end and any(self.read(end, start - end)):
                raise corrupt("container 4.3", f"padding at {end}")
        for page in pages:
            self.page(page)
        tensors = {t.name.decode(): {"dtype": t.dtype.name, "shape": list(t.shape), "shards": []} for t in self.layout.tensors}
        for row, shard in enumerate(self.layout.shards):
            tensors[self.layout.tensors[shard.tensor].name.decode()]["shards"].append(self._shard(row, shard))
        blobs = [{"rank": rank, "name": name.decode(), "sha256": sha256(self.page(page)).hexdigest()} for rank, name, page in self.blobs]
        return {"id": self.id.hex(), "digest": self.digest.hex(), "tensors": tensors, "blobs": blobs}
