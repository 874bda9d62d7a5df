"""Entropy coding of planes: runs, Huffman, splits (entropy)."""

import numpy as np

from .errors import corrupt

MAX_LENGTH = 11
MAX_DEPTH = 8


class Reader:
    """Takes from the front; nothing beyond the end (entropy 2)."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise corrupt("entropy 2", f"{size} bytes wanted, {len(self.data) - self.at} left")
        self.at += size
        return self.data[self.at - size:self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def symbols(self, clause: str) -> range:
        """First and last symbol of a table (entropy 4)."""
        first, last = self.take(2)
        if last <= first:
            raise corrupt(clause, f"table of symbols {first} to {last}")
        return range(first, last + 1)


class Huffman:
    """A code, as the symbol and the length that each 11 bits begin with; they lie there as canonical codes ascend (entropy 5.2)."""

    def __init__(self, reader: Reader) -> None:
        symbols = np.array(reader.symbols("entropy 5.1"))
        halves = np.frombuffer(reader.take((symbols.size + 1) // 2), np.uint8)
        lengths = np.stack([halves & 15, halves >> 4], 1).reshape(-1).astype(int)
        if lengths[symbols.size:].any():
            raise corrupt("entropy 5.1", "unused half of a table is not 0")
        lengths = lengths[:symbols.size]
        if not lengths[0] or not lengths[-1] or lengths.max() > MAX_LENGTH:
            raise corrupt("entropy 5.1", f"code lengths {lengths}")
        used = lengths > 0
        symbols, lengths = symbols[used], lengths[used]
        order = np.lexsort((symbols, lengths))
        shares = 1 << (MAX_LENGTH - lengths[order])
        if shares.sum() != 1 << MAX_LENGTH:
            raise corrupt("entropy 5.1", "incomplete or oversubscribed code")
        self.symbols = np.repeat(symbols[order].astype(np.uint8), shares)
        self.lengths = np.repeat(lengths[order], shares)

    def stream(self, data: bytes, count: int) -> bytes:
        if len(data) > -(-count * MAX_LENGTH // 8):
            raise corrupt("entropy 5.3", "a stream is too long")
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        padded = np.concatenate([bits, np.zeros(MAX_LENGTH, np.uint8)]).astype(int)
        windows = sum(padded[i:i + bits.size] << (MAX_LENGTH - 1 - i) for i in range(MAX_LENGTH))
        lengths, at, starts = self.lengths[windows].tolist(), 0, []
        for _ in range(count):
            if at >= bits.size:
                raise corrupt("entropy 5.3", "a stream is too short")
            starts.append(at)
            at += lengths[at]
        if -(-at // 8) != len(data) or bits[at:].any():
            raise corrupt("entropy 5.3", "a stream has another size, or unused bits that are 1")
        return self.symbols[windows[starts]].tobytes() if count else b""

    def block(self, reader: Reader, m: int) -> bytes:
        sizes = [reader.u32() for _ in range(4)]
        s = -(-m // 4)
        counts = [min((i + 1) * s, m) - min(i * s, m) for i in range(4)]
        return b"".join(self.stream(reader.take(size), count) for size, count in zip(sizes, counts))


def runs(reader: Reader, m: int) -> bytes:
    """entropy 6"""
    result, before = bytearray(), -1
    while len(result) < m:
        symbol, length, shift, more = reader.byte(), 1, 0, True
        while more:
            byte = reader.byte()
            length += (byte & 127) << shift
            if length > m - len(result):
                raise corrupt("entropy 6", "a run is longer than what is left")
            more, shift = byte >= 128, shift + 7
        if byte == 0 and shift > 7:
            raise corrupt("entropy 6", "length not in its shortest form")
        if symbol == before:
            raise corrupt("entropy 6", "equal symbols in neighbouring runs")
        result += bytes([symbol]) * length
        before = symbol
    return bytes(result)


class Blocks:
    """The blocks of a plane, and the previous table."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.table: Huffman | None = None

    def block(self, m: int, depth: int = 0) -> bytes:
        """The symbols of a block of `m` that lies in `depth` others (entropy 3)."""
        if depth > MAX_DEPTH:
            raise corrupt("entropy 7.2", f"a block in {depth} others")
        kind = self.reader.byte()
        if kind == 3:
            self.table = Huffman(self.reader)
        if kind == 0:
            return self.reader.take(m)
        if kind == 1:
            return self.reader.take(1) * m
        if kind == 2:
            return runs(self.reader, m)
        if kind in (3, 4) and self.table:
            return self.table.block(self.reader, m)
        if kind == 5:
            return self.split(m, depth)
        raise corrupt("entropy 3", f"kind {kind}, or no table before")

    def split(self, m: int, depth: int) -> bytes:
        """entropy 7"""
        result = np.full(m, self.reader.byte(), np.uint8)
        mask = self.block(-(-m // 8), depth + 1)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").astype(bool)
        if bits[m:].any():
            raise corrupt("entropy 7.1", "a bit beyond the block is 1")
        if others := int(bits.sum()):
            result[bits[:m]] = np.frombuffer(self.block(others, depth + 1), np.uint8)
        return result.tobytes()


def _blocks(reader: Reader, n: int) -> bytes:
    e = reader.byte()
    if not 12 <= e <= 20:
        raise corrupt("entropy 1.1", f"block exponent {e}")
    blocks = Blocks(reader)
    return b"".join(blocks.block(min(n - start, 1 << e)) for start in range(0, n, 1 << e))


def decode_plane(data: np.ndarray, n: int) -> np.ndarray:
    """The symbols of a plane of `n` (entropy 1)."""
    reader = Reader(data.tobytes())
    symbols = _blocks(reader, n) if n else b""
    if reader.at != len(reader.data):
        raise corrupt("entropy 1.2", f"{len(reader.data) - reader.at} bytes after the last block")
    return np.frombuffer(symbols, np.uint8)
