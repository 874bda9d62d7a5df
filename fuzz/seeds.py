"""Fills corpus/ from the golden store, the conformance cases and the vectors of the spec.

    seeds.py TARGET...
"""

import os
import struct
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "fuzz" / "corpus"
STORES = [ROOT / "tests" / "golden", ROOT / "conformance" / "cases"]
VECTORS = ROOT / "spec" / "vectors"
# Files of these targets, below each of STORES; the longest are left out.
FILES = {
    "cask": ["**/*.cask"],
    "index_split": ["**/*.cask"],
    "manifest": ["**/snapshots/*.json"],
    "log_entry": ["**/log/*.json", "**/store.json"],
    "directory": ["**/directories/*"],
    "inline": ["**/log/*.json"],
}
LONGEST = 40_000
# Of the target `statistics`.
PREDICATES = [b"nan > 0", b"norm >= 1e4 or nonfinite != 0 and zero = 0", b"changed == 0 and change_norm <= 0.5 or min<-1 and max>1"]
# These make their input from noise; a state of several tensors takes a lot of it.
NOISE = ["codecs", "kernels", "log_model", "round_trip", "store_model"]
CODECS = [
    "tc.planes", "tc.ordered", "tc.bitmask", "tc.raw", "tc.constant", "tc.remainder", "tc.predict step", "tc.predict moment", "tc.rows",
    "tc.factored", "tc.rounded", "tc.loguniform", "tc.blockwise8", "tc.cluster", "tc.kmeans", "tc.magnitudes",
    "tc.replay step", "tc.replay moment", "tc.gradient gradient",
    "tc.gradient moment", "tc.joint gradient", "tc.joint moment", "tc.joint step", "tc.descent", "tc.sparse",
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


def files(target: str) -> Iterator[tuple[str, bytes]]:
    for path in chain.from_iterable(store.glob(pattern) for store in STORES for pattern in FILES[target]):
        if path.stat().st_size < LONGEST:
            # No length is given to `index_split`: pieces of the default.
            before = b"\0" if target in ("index_split", "inline") else b""
            yield str(path.relative_to(ROOT)).replace("/", "_").replace(".", "_"), before + path.read_bytes()


def statistics() -> Iterator[tuple[str, bytes]]:
    """The blobs `tc.statistics` of casks, each after a line with a predicate; and noise."""
    for store in STORES:
        for path in store.glob("**/*.cask"):
            content = path.read_bytes()
            # A Parquet file starts and ends with these letters. No other blob of these casks has them.
            start, end = content.find(b"PAR1"), content.rfind(b"PAR1")
            if start < end <= start + LONGEST:
                yield str(path.relative_to(ROOT)).replace("/", "_"), PREDICATES[0] + b"\n" + content[start : end + 4]
    for number in range(100):
        yield f"noise-{number}", PREDICATES[number % len(PREDICATES)] + b"\n" + os.urandom(800)


def vectors() -> Iterator[tuple[str, bytes]]:
    """In the form of `ChunkInput` in src/lib.rs."""
    seeds = []
    for rows in tomllib.loads((VECTORS / "codecs.toml").read_text()).values():
        for row in rows:
            base = data(row["base"]) if "base" in row else None
            codec = row["codec"] if row["codec"] not in ("tc.predict", "tc.replay", "tc.gradient", "tc.joint") else f"{row['codec']} {row['columns'][0][0]}"
            seeds.append(chunk(codec, row["dtype"], row["elements"], [data(column) for _, column in row["columns"]], base))
    for rows in tomllib.loads((VECTORS / "entropy.toml").read_text()).values():
        for row in rows:
            elements = row["count"] if "count" in row else len(data(row["symbols"]))
            seeds.append(chunk("tc.planes", "u8", elements, [data(row["code"])], None))
    return ((f"vector-{number}", seed) for number, seed in enumerate(seeds) if seed is not None)


for target in sys.argv[1:]:
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    if target in NOISE:
        seeds = ((f"noise-{i}", os.urandom(800)) for i in range(100) if not (folder / f"noise-{i}").exists())
    else:
        made = {"decoders": vectors, "statistics": statistics}
        seeds = made[target]() if target in made else files(target)
    for name, seed in seeds:
        (folder / name).write_bytes(seed)
