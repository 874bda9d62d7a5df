"""Damages valid casks and stores at random: the reader must reject, or say what it said before (of objects that do not
count, such as stray ones); it must never fail. Casks with faults under right checksums may be accepted, but must not make it fail.

    damage_check.py [--tries N] [--seed N]
"""

import argparse
import io
import json
import random
import shutil
import struct
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from zlib import crc32

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from tensorcask_reference.__main__ import main as adapter  # noqa: E402

LARGEST = 1 << 18


def say(path: Path) -> tuple[int, str]:
    """Exit status, and stdout or, of a crash, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = adapter(["read", str(path)])
    return status, out.getvalue() if status < 2 else err.getvalue()


def damage(rng: random.Random, data: bytes) -> bytes:
    """Flips a bit or some bytes, cuts, adds, or repeats a range elsewhere."""
    result, kind = bytearray(data), rng.randrange(6)
    at = rng.randrange(len(data) + 1)
    if kind == 0:
        return bytes(result[:at])
    if kind == 1:
        return bytes(result) + rng.randbytes(rng.randrange(1, 65))
    if kind == 2:
        size, source = rng.randrange(1, 65), rng.randrange(len(data) + 1)
        piece = data[source:source + size]
        result[at:at + len(piece)] = piece
        return bytes(result)
    for _ in range(1 if kind < 5 else 4):
        at = rng.randrange(len(data))
        result[at] ^= 1 << rng.randrange(8)
    return bytes(result)


def reseal(rng: random.Random, data: bytes) -> bytes:
    """Faults in the root of a cask, under checksums that are right: they reach the clauses behind the checksums."""
    result = bytearray(data)
    end = len(data) - 96
    (root,) = struct.unpack_from("<Q", result, end)
    for _ in range(rng.randrange(1, 3)):
        if rng.random() < 0.4:
            value = rng.choice([0, 1, 2, 255, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1])
            struct.pack_into("<Q", result, root + 8 * rng.randrange((end - root) // 8), value)
        else:
            at = rng.choice([i for i in range(root, end) if data[i]] or [root])
            result[at] = rng.randrange(256)
    id = bytes(result[8:24])
    struct.pack_into("<I", result, end + 8, crc32(result[root:end], crc32(id + struct.pack("<Q", root))))
    struct.pack_into("<I", result, end + 80, crc32(id + bytes(result[end:end + 80])))
    return bytes(result)


def inputs() -> list[Path]:
    valid = HERE.parent / "cases" / "valid"
    found = [case / name for case in sorted(valid.glob("*/*")) for name in ("input", "input.cask") if (case / name).exists()]
    return [path for path in found if sum(file.stat().st_size for file in [path, *path.rglob("*")]) < LARGEST]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sources = inputs()
    before = {path: say(path) for path in sources}
    counts = {"rejected": 0, "same": 0}
    for number in range(options.tries):
        rng = random.Random(f"{options.seed}/{number}")
        source = rng.choice(sources)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / source.name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
            files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
            victim = rng.choice(files)
            old = victim.read_bytes()
            new = damage(rng, old) if old else b"?"
            victim.write_bytes(new)
            status, said = say(path)
        accepted = status == 0 and json.loads(said) == json.loads(before[source][1])
        if status not in (0, 1) or status == 0 and not accepted:
            print(f"try {number} of seed {options.seed}: {victim.name} of {source}: status {status}, {said[:300]}", file=sys.stderr)
            return 1
        counts["rejected" if status else "same"] += new != old
    print(f"{options.tries} damaged inputs: {counts['rejected']} rejected, {counts['same']} read as before")
    casks = [path.read_bytes() for path in sources if path.is_file()]
    for number in range(options.tries):
        rng = random.Random(f"{options.seed}/faults/{number}")
        with tempfile.NamedTemporaryFile(suffix=".cask") as file:
            file.write(reseal(rng, rng.choice(casks)))
            file.flush()
            status, said = say(Path(file.name))
        if status > 1:
            print(f"try root/{number} of seed {options.seed}: {said[:300]}", file=sys.stderr)
            return 1
    print(f"{options.tries} casks with faults in their root under right checksums: no crash")
    return 0


if __name__ == "__main__":
    sys.exit(main())
