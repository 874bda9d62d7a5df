"""LMC 5.2, figures 13 and 14: PIGZ and PBZ2 beside us, by threads, on one large delta."""

import os
import resource
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import states
from data import TooFew
from peers import chunk_items
from tables import ratio, spread, table

MIB = 128
# Each takes part in five rounds; what is fast goes on, so that it meets moments in which both cores are free.
ROUNDS, MOST_ROUNDS, MOST_SECONDS = 5, 60, 40
THREADS = (1, 2)
# Debian's package, options of every call. Both compress what was grouped by bytes before, which is not timed.
PROGRAMS = {"PIGZ": "pigz", "PBZ2": "pbzip2"}
OURS = {"`tc.planes`": ({"codec": "tc.planes"}, False), "`balanced`, checked": ({"objective": "balanced"}, True)}


def used():
    """CPU seconds of this process and of its children so far."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def timed(work):
    """What some work gives, with its seconds and CPU seconds."""
    cpu, begun = used(), time.perf_counter()
    result = work()
    return result, time.perf_counter() - begun, used() - cpu


class Program:
    """A compressor that reads and writes files in memory."""

    def __init__(self, program, folder, threads):
        self.program, self.threads = program, threads
        self.input, self.packed, self.output = (folder / name for name in ("input", f"{program}.packed", f"{program}.output"))

    def call(self, source, target, *options):
        with source.open("rb") as given, target.open("wb") as taken:
            subprocess.run([self.program, f"-p{self.threads}", "-c", *options], stdin=given, stdout=taken, check=True)

    def encode(self):
        self.call(self.input, self.packed)
        return self.packed.stat().st_size

    def decode(self):
        self.call(self.packed, self.output, "-d")

    def same(self):
        return self.input.read_bytes() == self.output.read_bytes()


class Ours:
    """Our coders on chunks, in threads of one process."""

    def __init__(self, case, how, checks, threads):
        self.items, self.encoded = chunk_items(case, how), []
        for item in self.items:
            item.checks = checks
        self.pool = ThreadPoolExecutor(threads)

    def encode(self):
        self.encoded = list(self.pool.map(lambda item: item.encode(), self.items))
        return sum(one.stored_bytes for one in self.encoded)

    def decode(self):
        list(self.pool.map(lambda pair: pair[0].decode(pair[1]), zip(self.items, self.encoded, strict=True)))

    def same(self):
        return all(np.array_equal(item.out, item.expected) for item in self.items)


def grouped(case):
    """Bytes of the exclusive or of a case: the high byte of every element, then the low byte."""
    words = np.concatenate([tensor.words(tensor.data) ^ tensor.words(tensor.base) for tensor in case.tensors])
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, 2)[:, ::-1].T).tobytes()


def measure_threads(run):
    run.need(1000, 1010)
    lacking = [program for program in PROGRAMS.values() if shutil.which(program) is None]
    if lacking:
        raise TooFew(f"program {' and '.join(lacking)}: apt-get install -y {' '.join(lacking)}")
    case = next(case for _, _, case in states.cases(run.folder, MIB * 1.05, ["bf16-k10"]))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        folder = Path(folder)
        (folder / "input").write_bytes(grouped(case))
        given = [(name, threads, Program(program, folder, threads)) for name, program in PROGRAMS.items() for threads in THREADS]
        given += [(name, threads, Ours(case, how, checks, threads)) for name, (how, checks) in OURS.items() for threads in THREADS]
        rows = [{"name": name, "threads": threads, "encode": [], "decode": []} for name, threads, _ in given]
        for number in range(MOST_ROUNDS):
            for row, (name, _, one) in zip(rows, given, strict=True):
                if number >= ROUNDS and sum(seconds for way in ("encode", "decode") for seconds, _ in row[way]) > MOST_SECONDS:
                    continue
                row["stored"], *times = timed(one.encode)
                row["encode"].append(times)
                row["decode"].append(timed(one.decode)[1:])
                if number == 0 and not one.same():
                    raise AssertionError(f"{name}: restored bytes differ")
    return {"data": run.describe(), "bytes": case.bytes, "cores": os.cpu_count(), "rows": rows}


def threads_tables(found):
    size, rows, cores = found["bytes"], [], []
    for row in found["rows"]:
        both = [row[way] for way in ("encode", "decode")]
        speeds = [spread([size / seconds / 2**20 for seconds, _ in way], 0) for way in both]
        rows.append([row["name"], row["threads"], ratio(row["stored"] / size), *speeds, len(both[0])])
        cpu = [spread([used / size * 1e9 for _, used in way]) for way in both]
        fastest = [min(way) for way in both]
        best = [f"{size / seconds / 2**20:,.0f} on {used / seconds:.2f} cores" for seconds, used in fastest]
        cores.append([row["name"], row["threads"], *cpu, *best])
    heads = ["encode, CPU s / GB", "decode, CPU s / GB", "fastest encode, MiB/s", "fastest decode, MiB/s"]
    return {
        "threads": table(["", "threads", "ratio", "encode, MiB/s", "decode, MiB/s", "rounds"], rows),
        "threads-cpu": table(["", "threads", *heads], cores),
    }
