"""Measures what a commit costs: milliseconds and requests of a save of one small tensor, on disk or on a server.

    python benches/python/commit_cost.py [URL] [--saves N]

Prints one line: median and quartiles of the time of a save, and requests per save. The state is tiny, so nearly all of
the time is the commit. Every eighth save is a base.
Compare two versions of the package by running both in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import tensorcask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="a new store; a temporary folder if left out")
    parser.add_argument("--saves", type=int, default=60, help="number of saves that count [60]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = tensorcask.Store(given.url or folder)
        data = bytearray(4096)
        times, requests = [], 0
        for step in range(given.saves + 5):
            data[step % 4096] ^= 1
            before = store.native().io()[0]
            begun = time.perf_counter()
            store.save({"w": tensorcask.RawTensor("u8", (4096,), data)}, step=step, policy="intermittent:8")
            # The first saves open the store and its connections.
            if step >= 5:
                times.append((time.perf_counter() - begun) * 1e3)
                requests += store.native().io()[0] - before
        low, median, high = statistics.quantiles(times, n=4)
        print(f"{median:.2f} ms a save (quartiles {low:.2f} to {high:.2f}), {requests / given.saves:.1f} requests a save")


if __name__ == "__main__":
    main()
