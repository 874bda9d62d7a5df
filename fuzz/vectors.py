"""Writes the vectors of the codecs as inputs of the target `decoders`: the form is that of `ChunkInput` in src/lib.rs.

    vectors.py FOLDER
"""

import struct
import sys
import tomllib
from pathlib import Path

VECTORS = Path(__file__).resolve().parent.parent / "spec" / "vectors"
CODECS = [
    "tc.planes", "tc.ordered", "tc.bitmask", "tc.raw", "tc.constant", "tc.remainder", "tc.predict step", "tc.predict moment", "tc.rows",
    "tc.factored", "tc.rounded", "tc.loguniform", "tc.blockwise8", "tc.cluster", "tc.kmeans", "tc.magnitudes",
]
DTYPES = (
    "bool u8 u16 u32 u64 i8 i16 i32 i64 f16 bf16 f32 f64 c64 c128 f8_e4m3 f8_e5m2 f8_e4m3fnuz f8_e5m2fnuz f8_e8m0 f6_e2m3 f6_e3m2 f4_e2m1 "
    "int4 uint4"
).split()


def data(value: str | list) -> bytes:
    return bytes.fromhex(value) if isinstance(value, str) else b"".join(bytes.fromhex(text) * times for text, times in value)


def chunk(codec: str, dtype: str, elements: int, columns: list[bytes], base: bytes | None) -> bytes | None:
    if codec not in CODECS or not 0 < elements <= 65536 or any(len(column) > 65535 for column in columns):
        return None
    head = struct.pack("<BBHB", CODECS.index(codec), DTYPES.index(dtype), elements - 1, base is not None)
    return head + b"".join(struct.pack("<H", len(column)) for column in columns) + b"".join(columns) + (base or b"")


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
seeds = []
for kind, rows in tomllib.loads((VECTORS / "codecs.toml").read_text()).items():
    for row in rows:
        base = data(row["base"]) if "base" in row else None
        codec = row["codec"] if row["codec"] != "tc.predict" else f"tc.predict {row['columns'][0][0]}"
        seeds.append(chunk(codec, row["dtype"], row["elements"], [data(column) for _, column in row["columns"]], base))
for kind, rows in tomllib.loads((VECTORS / "entropy.toml").read_text()).items():
    for row in rows:
        elements = row["count"] if "count" in row else len(data(row["symbols"]))
        seeds.append(chunk("tc.planes", "u8", elements, [data(row["code"])], None))
for number, seed in enumerate(seeds):
    if seed is not None:
        (folder / f"vector-{number}").write_bytes(seed)
