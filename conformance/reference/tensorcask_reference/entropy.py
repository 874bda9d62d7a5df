"""Entropy coding of planes: runs, Huffman, rANS (entropy)."""

from collections.abc import Callable

import numpy as np

from .errors import corrupt

STATES, SLOTS, LOW, HIGH = 16, 4096, 1 << 15, 1 << 31
MAX_LENGTH = 11


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


class Rans:
    """Frequencies, as symbol, frequency, and distance from its start, of each slot (entropy 7.2)."""

    def __init__(self, reader: Reader) -> None:
        self.slots: list[tuple[int, int, int]] = []
        for symbol in reader.symbols("entropy 7.1"):
            frequency = reader.byte()
            if frequency >= 128:
                high = reader.byte()
                if not 1 <= high <= 127:
                    raise corrupt("entropy 7.1", "frequency not in its form")
                frequency += (high - 1) * 128
            if not self.slots and not frequency:
                raise corrupt("entropy 7.1", "first symbol of frequency 0")
            self.slots += [(symbol, frequency, i) for i in range(frequency)]
            if len(self.slots) > SLOTS:
                raise corrupt("entropy 7.1", f"frequencies add up to more than {SLOTS}")
        if not frequency or len(self.slots) != SLOTS:
            raise corrupt("entropy 7.1", f"last frequency {frequency}, sum {len(self.slots)}")

    def block(self, reader: Reader, m: int) -> bytes:
        size = reader.u32()
        if size % 2:
            raise corrupt("entropy 7.3", f"{size} bytes of words")
        x = [reader.u32() for _ in range(STATES)]
        if not all(LOW <= state < HIGH for state in x):
            raise corrupt("entropy 7.3", "state out of range")
        words = iter(np.frombuffer(reader.take(size), "<u2").tolist())
        slots, result = self.slots, bytearray(m)
        for i in range(m):
            state = x[i % STATES]
            result[i], frequency, beyond = slots[state % SLOTS]
            state = frequency * (state // SLOTS) + beyond
            if state < LOW:
                word = next(words, None)
                if word is None:
                    raise corrupt("entropy 7.3", "words are missing")
                state = state << 16 | word
            x[i % STATES] = state
        if next(words, None) is not None or any(state != LOW for state in x):
            raise corrupt("entropy 7.3", "words are left over, or other final states")
        return bytes(result)


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


TABLES: dict[int, Callable[[Reader], Huffman | Rans]] = {3: Huffman, 5: Rans}


def _blocks(reader: Reader, n: int) -> bytes:
    e = reader.byte()
    if not 12 <= e <= 20:
        raise corrupt("entropy 1.1", f"block exponent {e}")
    result: list[bytes] = []
    tables: dict[int, Huffman | Rans] = {}
    for start in range(0, n, 1 << e):
        m = min(n - start, 1 << e)
        kind = reader.byte()
        if kind in TABLES:
            tables[kind] = TABLES[kind](reader)
        if kind == 0:
            result.append(reader.take(m))
        elif kind == 1:
            result.append(reader.take(1) * m)
        elif kind == 2:
            result.append(runs(reader, m))
        elif kind <= 6 and (table := tables.get(kind - 1 + kind % 2)):
            result.append(table.block(reader, m))
        else:
            raise corrupt("entropy 3", f"kind {kind}, or no table before")
    return b"".join(result)


def decode_plane(data: np.ndarray, n: int) -> np.ndarray:
    """The symbols of a plane of `n` (entropy 1)."""
    reader = Reader(data.tobytes())
    symbols = _blocks(reader, n) if n else b""
    if reader.at != len(reader.data):
        raise corrupt("entropy 1.2", f"{len(reader.data) - reader.at} bytes after the last block")
    return np.frombuffer(symbols, np.uint8)
