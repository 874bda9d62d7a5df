#!/usr/bin/env python3
"""How much memory and time a reader takes for hostile input: python3 conformance/cost.py 'CMD {path}' [--over MIB] [--runner PROGRAM]

Runs the reader (an adapter, README.md) on every case, each in a process of its own, and compares its peak of resident memory with that on
the smallest valid case. Fails if some case takes more than --over (64) MiB beyond that, and tells which took the most memory and time. Linux counts
what this Python has at the start of a process as that process's: a reader that takes less (some 15 MiB) is shown with that.
Needs Python 3.11 on Linux and nothing else; cases whose input is made when it is needed also want the runner, `tensorcask-conformance`.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path


def cost(command: list[str], path: Path) -> tuple[int, float]:
    """Peak resident bytes, and seconds."""
    words = [word.replace("{path}", str(path)) for word in command]
    begun = time.perf_counter()
    child = os.posix_spawnp(words[0], words, os.environ, file_actions=[
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)])
    _, status, usage = os.wait4(child, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        sys.exit(f"{path}: the reader crashed: exit {os.waitstatus_to_exitcode(status)}")
    return usage.ru_maxrss * 1024, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader")
    parser.add_argument("--over", type=float, default=64.0, metavar="MIB")
    parser.add_argument("--runner", metavar="PROGRAM", help="makes the inputs that are not kept with the cases")
    given = parser.parse_args()
    command = shlex.split(given.reader)
    cases = Path(__file__).parent / "cases"

    def bytes_of(path: Path) -> int:
        return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())

    found, left_out = [], 0
    for description in sorted(cases.rglob("case.toml")):
        folder = description.parent
        name, case = str(folder.relative_to(cases)), tomllib.loads(description.read_text())
        with tempfile.TemporaryDirectory() as temporary:
            path = folder / "input.cask" if (folder / "input.cask").exists() else folder / "input"
            if case.get("made"):
                if given.runner is None:
                    left_out += 1
                    continue
                path = Path(temporary) / "input"
                subprocess.run([given.runner, "make", name, path], check=True)
            found.append((name, case["expect"], bytes_of(path), *cost(command, path)))
    if left_out:
        print(f"{left_out} cases whose input is made are left out: --runner")
    least = min((row for row in found if row[1] == "accept"), key=lambda row: row[2])
    usual = least[3]
    print(f"{len(found)} cases; {usual / 2**20:.1f} MiB for the smallest valid one, {least[0]}")
    for title, by in (("memory", 3), ("time", 4)):
        print(f"most {title}:")
        for row in sorted(found, key=lambda row: -row[by])[:5]:
            print(f"  {row[0]}: {row[2]} bytes, {(row[3] - usual) / 2**20:+.1f} MiB, {row[4]:.3f} s")
    over = [row[0] for row in found if row[3] - usual > given.over * 2**20 + row[2]]
    if over:
        sys.exit(f"more than {given.over:g} MiB and the input beyond that: {', '.join(over)}")


if __name__ == "__main__":
    main()
