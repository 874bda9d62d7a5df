"""Element types and the chunk grid (container 6 and 7)."""

from dataclasses import dataclass
from math import lcm, prod

from .errors import unsupported

CHUNK_ELEMENTS = 1 << 18
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Dtype:
    code: int
    name: str
    bits: int
    unit: int

    def size(self, elements: int) -> int:
        """container 6.4"""
        return -(-elements * self.bits // 8)


_TABLE = """bool 8 1, u8 8 1, u16 16 2, u32 32 4, u64 64 8, i8 8 1, i16 16 2, i32 32 4, i64 64 8, f16 16 2, bf16 16 2, f32 32 4,
    f64 64 8, c64 64 4, c128 128 8, f8_e4m3 8 1, f8_e5m2 8 1, f8_e4m3fnuz 8 1, f8_e5m2fnuz 8 1, f8_e8m0 8 1, f6_e2m3 6 1,
    f6_e3m2 6 1, f4_e2m1 4 1, int4 4 1, uint4 4 1"""
_ROWS = [row.split() for row in _TABLE.split(",")]
DTYPES = {code: Dtype(code, name, int(bits), int(unit)) for code, (name, bits, unit) in enumerate(_ROWS, 1)}


def dtype_of(code: int) -> Dtype:
    if code not in DTYPES:
        raise unsupported("container 7", f"dtype of code {code}")
    return DTYPES[code]


def elements(shape: Shape) -> int:
    return 0 if 0 in shape else prod(shape)


def chunk_elements(dtype: Dtype, shape: Shape) -> int:
    """Elements of a whole chunk of a shard (container 6.2)."""
    last = shape[-1] if shape else 1
    unit = last if dtype.bits >= 8 or last == 0 else lcm(last, 8)
    return CHUNK_ELEMENTS // unit * unit if 1 <= unit <= CHUNK_ELEMENTS else CHUNK_ELEMENTS


def chunk_count(dtype: Dtype, shape: Shape) -> int:
    return -(-elements(shape) // chunk_elements(dtype, shape))


def elements_of_chunk(dtype: Dtype, shape: Shape, number: int) -> int:
    whole = chunk_elements(dtype, shape)
    return min(whole, elements(shape) - number * whole)
