"""What is measured: peers, baselines in numpy, and our codecs. Each is made for one tensor, encodes it, and gives every bit back.

A peer that knows nothing of bases is given the exclusive or of tensor and base; making that is not timed, for nobody.
"""

import bz2
import gzip
import importlib
import zlib

import numpy as np
from tensorcask import InvalidArgumentError, RawTensor
from tensorcask.codec import Coder, codecs

CANDIDATES = []


def candidate(name, kind, needs=None):
    """Registers a class; `needs` is the module that it wants."""

    def register(cls):
        CANDIDATES.append((name, kind, needs, cls))
        return cls

    return register


class Unfit(Exception):
    """This candidate cannot store such a tensor."""


class OfBytes:
    """Encodes bytes: those of the tensor, or of its exclusive or with the base."""

    def __init__(self, tensor, module):
        self.module = module
        self.width = tensor.width
        self.float32 = tensor.dtype == "f32" and tensor.base is None
        self.bf16 = tensor.dtype == "bf16"
        words = tensor.words(tensor.data)
        if tensor.base is not None:
            words = words ^ tensor.words(tensor.base)
        self.input = words.view(np.uint8)
        self.words = words
        self.expected = self.input
        self.prepare()

    def prepare(self):
        pass

    def size(self, encoded):
        return len(encoded)


class OfPlanes(OfBytes):
    """Byte grouping first, by numpy: each plane is encoded apart, one that is noise kept as it is."""

    def encode(self):
        planes = np.ascontiguousarray(self.input.reshape(-1, self.width).T)
        coded = []
        for plane in planes:
            code = self.encode_plane(plane)
            coded.append(code if len(code) < len(plane) else plane)
        return coded

    def decode(self, coded):
        if self.width == 1:
            return coded[0] if isinstance(coded[0], np.ndarray) else self.decode_plane(coded[0])
        out = np.empty((len(self.input) // self.width, self.width), np.uint8)
        for at, code in enumerate(coded):
            out[:, at] = code if isinstance(code, np.ndarray) else np.frombuffer(self.decode_plane(code), np.uint8)
        return out.reshape(-1)

    def size(self, coded):
        return sum(len(code) for code in coded)


@candidate("ZipNN", "peer", "zipnn")
class ZipNn(OfBytes):
    def prepare(self):
        if self.width == 1:
            raise Unfit
        self.codec = self.module.ZipNN(input_format="byte", bytearray_dtype="bfloat16" if self.bf16 else "float32", threads=1)
        # It may reorder bits in place.
        self.scratch = bytearray(self.input)

    def encode(self):
        self.scratch[:] = memoryview(self.input)
        return self.codec.compress(self.scratch)

    def decode(self, encoded):
        return self.codec.decompress(encoded)


@candidate("z4ai", "peer", "z4ai")
class Z4ai(OfBytes):
    def prepare(self):
        self.raw = self.input.tobytes()
        self.dtype = "bf16" if self.bf16 else {1: "uint8", 4: "fp32"}[self.width]

    def encode(self):
        return self.module.compress(self.raw, dtype=self.dtype, threads=1)

    def decode(self, encoded):
        return self.module.decompress(encoded)


@candidate("z4ai, its delta", "peer", "z4ai")
class Z4aiDelta(Z4ai):
    def __init__(self, tensor, module):
        super().__init__(tensor, module)
        if tensor.base is None:
            raise Unfit
        self.raw, self.reference, self.expected = tensor.data.tobytes(), tensor.base.tobytes(), tensor.data

    def encode(self):
        return self.module.compress_delta(self.raw, self.reference, dtype=self.dtype, threads=1)

    def decode(self, encoded):
        return self.module.decompress_delta(encoded, self.reference)


def _zstd(name, level):
    @candidate(f"zstd -{level}", "peer", "zstandard")
    class Zstd(OfBytes):
        def prepare(self):
            self.encoder, self.decoder = self.module.ZstdCompressor(level=level), self.module.ZstdDecompressor()

        def encode(self):
            return self.encoder.compress(self.input)

        def decode(self, encoded):
            return self.decoder.decompress(encoded)


_zstd("zstd", 1)
_zstd("zstd", 3)


@candidate("zstd -1, byte planes", "peer", "zstandard")
class ZstdPlanes(OfPlanes):
    def prepare(self):
        self.encoder, self.decoder = self.module.ZstdCompressor(level=1), self.module.ZstdDecompressor()

    def encode_plane(self, plane):
        return self.encoder.compress(plane)

    def decode_plane(self, code):
        return self.decoder.decompress(code)


@candidate("zstd as huff0 alone, byte planes", "peer", "zstandard")
class Huff0Planes(ZstdPlanes):
    """A table of 64 places finds hardly a match of 7 bytes in weights: what remains is the literals, that is huff0."""

    def prepare(self):
        super().prepare()
        fast = self.module.STRATEGY_FAST
        parameters = self.module.ZstdCompressionParameters(
            window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0, strategy=fast
        )
        self.encoder = self.module.ZstdCompressor(compression_params=parameters)


def _blosc(codec, level, filter_name):
    @candidate(f"blosc2 {codec}-{level}, {filter_name}", "peer", "blosc2")
    class Blosc(OfBytes):
        def prepare(self):
            blosc2 = self.module
            self.parameters = {
                "codec": getattr(blosc2.Codec, codec.upper()),
                "clevel": level,
                "typesize": self.width,
                "filters": [getattr(blosc2.Filter, filter_name.upper())],
                "nthreads": 1,
            }
            self.out = np.empty_like(self.input)

        def encode(self):
            return self.module.compress2(self.words, **self.parameters)

        def decode(self, encoded):
            self.module.decompress2(encoded, dst=self.out, nthreads=1)
            return self.out


_blosc("lz4", 5, "bitshuffle")
_blosc("zstd", 1, "shuffle")
_blosc("zstd", 1, "bitshuffle")


@candidate("pcodec", "peer", "pcodec")
class Pcodec(OfBytes):
    """Integers, or floats where it knows them: there are no bf16."""

    def prepare(self):
        importlib.import_module("pcodec.standalone")
        if self.width == 1:
            raise Unfit
        self.elements = self.words.view(np.float32) if self.float32 else self.words

    def encode(self):
        return self.module.standalone.simple_compress(self.elements, self.module.ChunkConfig())

    def decode(self, encoded):
        return self.module.standalone.simple_decompress(encoded).view(np.uint8)


@candidate("lz4", "peer", "lz4.block")
class Lz4(OfBytes):
    def encode(self):
        return self.module.compress(self.input)

    def decode(self, encoded):
        return self.module.decompress(encoded)


@candidate("lz4, byte planes", "peer", "lz4.block")
class Lz4Planes(OfPlanes):
    def encode_plane(self, plane):
        return self.module.compress(plane)

    def decode_plane(self, code):
        return self.module.decompress(code)


@candidate("bz2", "peer")
class Bz2(OfBytes):
    def encode(self):
        return bz2.compress(self.input)

    def decode(self, encoded):
        return bz2.decompress(encoded)


@candidate("bz2, byte planes", "peer")
class Bz2Planes(OfPlanes):
    def encode_plane(self, plane):
        return bz2.compress(plane)

    def decode_plane(self, code):
        return bz2.decompress(code)


@candidate("gzip -6", "peer")
class Gzip(OfBytes):
    def encode(self):
        return gzip.compress(self.input, 6, mtime=0)

    def decode(self, encoded):
        return gzip.decompress(encoded)


@candidate("DEFLATE (zlib -1)", "peer")
class Deflate(OfBytes):
    def encode(self):
        return zlib.compress(self.input, 1, wbits=-15)

    def decode(self, encoded):
        return zlib.decompress(encoded, wbits=-15, bufsize=len(self.input))


@candidate("gzip -6, byte planes", "peer")
class GzipPlanes(OfPlanes):
    def encode_plane(self, plane):
        return gzip.compress(plane, 6, mtime=0)

    def decode_plane(self, code):
        return gzip.decompress(code)


@candidate("DEFLATE (zlib -1), byte planes", "peer")
class DeflatePlanes(OfPlanes):
    def encode_plane(self, plane):
        return zlib.compress(plane, 1, wbits=-15)

    def decode_plane(self, code):
        return zlib.decompress(code, wbits=-15, bufsize=len(self.input) // self.width)


class OfChanges:
    """Positions of changed elements, and their new values."""

    def __init__(self, tensor, module):
        if tensor.base is None:
            raise Unfit
        self.new, self.old = tensor.words(tensor.data), tensor.words(tensor.base)
        self.expected = tensor.data

    def encode(self):
        changed = self.new != self.old
        return *self.positions(changed), self.new[changed]

    def decode(self, encoded):
        *positions, values = encoded
        out = self.old.copy()
        out[self.where(*positions)] = values
        return out.view(np.uint8)

    def size(self, encoded):
        return sum(part.nbytes for part in encoded)


@candidate("naive mask, a byte per element", "baseline")
class NaiveMask(OfChanges):
    def positions(self, changed):
        return (changed.view(np.uint8),)

    def where(self, mask):
        return mask.view(bool)


@candidate("BitSnap: packed mask and values", "baseline")
class PackedMask(OfChanges):
    def positions(self, changed):
        return (np.packbits(changed, bitorder="little"),)

    def where(self, mask):
        return np.unpackbits(mask, count=len(self.old), bitorder="little").view(bool)


@candidate("COO, uint32 indices", "baseline")
class Coo32(OfChanges):
    def positions(self, changed):
        return (np.flatnonzero(changed).astype(np.uint32),)

    def where(self, indices):
        return indices


@candidate("COO, uint16 indices", "baseline")
class Coo16(OfChanges):
    """Indices in blocks of 2^16 elements, with a count for each block."""

    def positions(self, changed):
        indices = np.flatnonzero(changed)
        counts = np.bincount(indices >> 16, minlength=(len(changed) + 65535) >> 16)
        return counts.astype(np.uint32), indices.astype(np.uint16)

    def where(self, counts, indices):
        return np.repeat(np.arange(len(counts), dtype=np.int64) << 16, counts) + indices


class Ours:
    """A codec of ours, alone or as a writer runs it: with checksums and verify-after-encode."""

    def __init__(self, tensor, module, checks=False, **how):
        def raw(dtype, data):
            return None if data is None else RawTensor(dtype, tensor.shape, data)

        partners = {role: (raw(dtype, now), raw(dtype, before)) for role, (dtype, now, before) in tensor.partners.items()}
        try:
            self.coder = Coder(raw(tensor.dtype, tensor.data), base=raw(tensor.dtype, tensor.base), role=tensor.role, partners=partners, **how)
        except InvalidArgumentError as error:
            raise Unfit from error
        self.checks = checks
        self.expected = tensor.data
        self.out = np.zeros_like(tensor.data)

    def encode(self):
        return self.coder.encode(checks=self.checks)

    def decode(self, encoded):
        self.coder.decode_into(encoded, self.out)
        return self.out

    def size(self, encoded):
        return encoded.stored_bytes


class Memcpy:
    def __init__(self, tensor, module):
        self.expected, self.out = tensor.data, np.ones_like(tensor.data)
        self.back = np.ones_like(tensor.data)

    def encode(self):
        np.copyto(self.out, self.expected)
        return self.out

    def decode(self, encoded):
        np.copyto(self.back, encoded)
        return self.back

    def size(self, encoded):
        return encoded.nbytes


def ours(**how):
    return lambda tensor, module: Ours(tensor, module, **how)


# Those that round are measured by the bench `precision`: here every bit has to come back.
_ROUND = ("tc.blockwise8", "tc.cluster", "tc.kmeans", "tc.loguniform")
for _codec in codecs():
    if _codec not in ("tc.raw", "tc.constant", *_ROUND):
        candidate(_codec, "codec")(ours(codec=_codec))
        candidate(f"{_codec}, checked", "codec")(ours(codec=_codec, checks=True))
for _objective in ("smallest", "balanced", "fastest"):
    candidate(f"tensorcask, {_objective}", "ours")(ours(objective=_objective))
    candidate(f"tensorcask, {_objective}, checked", "ours")(ours(objective=_objective, checks=True))
CANDIDATES.insert(0, ("memcpy", "memcpy", None, Memcpy))


# Bounds: sizes without a coder.


def entropy_bytes(symbols):
    """Bytes that symbols take at their order-0 entropy, tables not counted."""
    counts = symbols[symbols > 0].astype(np.float64)
    total = counts.sum()
    return float(-(counts * np.log2(counts / total)).sum() / 8) if total else 0.0


def planes_bound(tensor, xor):
    words = tensor.words(tensor.data)
    if xor:
        words = words ^ tensor.words(tensor.base)
    planes = words.view(np.uint8).reshape(-1, tensor.width)
    return sum(entropy_bytes(np.bincount(planes[:, at], minlength=256)) for at in range(tensor.width))


def ordered_bound(tensor):
    """Differences of ordered integers, given the exponent of the base."""
    new, old = (tensor.words(which).astype(np.int64) for which in (tensor.data, tensor.base))
    ordered = lambda bits: np.where(bits & 0x8000, -(bits & 0x7FFF), bits & 0x7FFF)  # noqa: E731
    difference = ordered(new) - ordered(old) + (1 << 16)
    exponent = old >> 7 & 0xFF
    pairs = np.bincount(exponent << 17 | difference, minlength=1)
    return entropy_bytes(pairs) - entropy_bytes(np.bincount(exponent))


def bounds(case):
    """Names and sizes."""
    delta = case.tensors[0].base is not None
    found = [("order-0 entropy of byte planes", sum(planes_bound(tensor, False) for tensor in case.tensors))]
    if delta:
        found.append(("order-0 entropy of XOR byte planes", sum(planes_bound(tensor, True) for tensor in case.tensors)))
    if delta and all(tensor.dtype == "bf16" for tensor in case.tensors):
        found.append(("order-0 entropy of differences given the base's exponent", sum(ordered_bound(tensor) for tensor in case.tensors)))
    return found
