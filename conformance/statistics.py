"""Makes the blobs of the cases `statistics/*`, with pyarrow, for the state of the case `store/base`. They are made once and kept.

    conformance/reference/.venv/bin/python conformance/statistics.py
"""

import io
import struct
import sys
from math import floor, inf, isfinite, isnan, log2, nan
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "reference"))

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from forged_pages import forged  # noqa: E402
from tensorcask_reference.reserved import STATISTICS_COLUMNS  # noqa: E402

OUT = HERE / "src" / "generate" / "vectors" / "statistics"
TYPES = {"text": pa.string(), "number": pa.uint64(), "float": pa.float64(), "list": pa.list_(pa.uint64())}


# Elements of `m.w` at step 10: `pattern(24, 1)` of the generator, with one bit changed.
WEIGHTS = bytes((i * 37 + 1) % 256 ^ (0x10 if i == 20 else 0) for i in range(24))


def measure(values, least_normal):
    """statistics 3"""
    finite = [(i, value) for i, value in enumerate(values) if isfinite(value)]
    sums, squares, exponents = [0.0] * 16, [0.0] * 16, [0] * 16
    for i, value in finite:
        sums[i % 16] += value
        squares[i % 16] += value * value
        if i % 16 == 0 and value != 0:
            exponents[min(max(floor((floor(log2(abs(value))) + 48) / 4), 0), 15)] += 1
    total = lambda parts: sum(parts) if isfinite(sum(parts)) else None  # noqa: E731
    return {
        "nan": sum(map(isnan, values)), "positive_infinity": values.count(inf), "negative_infinity": values.count(-inf),
        "zero": values.count(0), "subnormal": sum(0 < abs(value) < least_normal for value in values),
        "min": min((value for _, value in finite), default=None), "max": max((value for _, value in finite), default=None),
        "sum": total(sums), "sum_squares": total(squares), "exponents": exponents,
    }  # fmt: skip


def rows():
    none = dict.fromkeys(name for name, (_, nullable) in STATISTICS_COLUMNS.items() if nullable)
    bf16 = [struct.unpack("<f", bytes(2) + WEIGHTS[at : at + 2])[0] for at in range(0, 24, 2)]
    f32 = list(struct.unpack("<2f", bytes([10] * 8)))
    of = lambda tensor, role, dtype, shape, elements, values: none | {  # noqa: E731
        "tensor": tensor, "role": role, "dtype": dtype, "shard_offset": [0] * len(shape), "shard_shape": shape, "chunk": 0,
        "elements": elements,
    } | values  # fmt: skip
    return [
        of("m.w", "model", "bf16", [4, 3], 12, measure(bf16, 2.0**-126)),
        of("o.exp_avg", "exp_avg", "f32", [2], 2, measure(f32, 2.0**-126)),
        of("o.step", "other", "i64", [], 1, {}),
    ]


def write(name, rows, types=None, drop=(), more=(), **options):
    types = {name: TYPES[kind] for name, (kind, _) in STATISTICS_COLUMNS.items()} | (types or {})
    columns = {name: pa.array([row[name] for row in rows], type) for name, type in types.items() if name not in drop}
    columns |= {name: pa.array(range(len(rows))) for name in more}
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, **{"compression": "snappy", **options})
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.parquet").write_bytes(out.getvalue())
    print(name, len(out.getvalue()))


def write_forged(name, rows):
    columns = {name: pa.array([row[name] for row in rows], TYPES[kind]) for name, (kind, _) in STATISTICS_COLUMNS.items()}
    (OUT / f"{name}.parquet").write_bytes(forged(pa.table(columns)))


def main():
    weight, moment, counter = rows()
    whole = [weight, moment, counter]
    write("whole", whole)
    write("other-forms", whole, compression="none", row_group_size=1, use_dictionary=False, data_page_version="2.0", version="2.6")
    write("tensor-that-is-gone", [weight | {"tensor": "a"}, *whole])
    change = {"reference_step": 5, "changed": 2, "change_squares": 0.25, "change_ulps": 7}
    write("change", [weight | change, moment, counter])
    write("out-of-order", [moment, weight, counter])
    write("row-twice", [weight, weight, counter])
    write("wrong-type", whole, types={"nan": pa.int64()})
    write("missing-column", whole, drop=["zero"])
    write("another-column", whole, more=["another"])
    write("null-tensor", [weight | {"tensor": None}])
    write("no-such-chunk", [weight | {"chunk": 1}])
    write("wrong-elements", [weight | {"elements": 11}])
    write("unknown-dtype", [weight | {"dtype": "f12"}])
    write("counts-beyond-elements", [weight | {"zero": 13}])
    write("minimum-above-maximum", [weight | {"min": 2.0, "max": 1.0}])
    write("infinite-sum", [weight | {"sum": inf}])
    write("values-of-an-integer", [counter | {"nan": 0}])
    write("no-values-of-a-float", [weight | dict.fromkeys(measure([], 0))])
    write("short-exponents", [weight | {"exponents": [0] * 15}])
    complex_number = {"tensor": "a.rotation", "dtype": "c64", "shard_offset": [0], "shard_shape": [2], "elements": 2}
    complex_number = weight | complex_number | measure([0.0, 1.5, nan, -2.0], 2.0**-126)
    narrow = {"tensor": "a.scale", "dtype": "f8_e4m3", "shard_offset": [0], "shard_shape": [4], "elements": 4}
    narrow = weight | narrow | measure([0.0, 448.0, nan, 2.0**-9], 2.0**-6)
    unmeasured = dict.fromkeys(measure([], 0))
    write("complex-and-narrow", [complex_number, narrow, *whole])
    write("not-measured", [complex_number | unmeasured, narrow | unmeasured, *whole])
    write("counts-beyond-the-parts", [complex_number | {"zero": 4}])
    write("some-values-of-a-narrow-float", [narrow | {"exponents": None}])
    write("values-of-a-packed-float", [narrow | {"dtype": "f4_e2m1"}])
    write_forged("pages-of-gigabytes", whole)
    write("change-without-a-step", [weight | change | {"reference_step": None}])


if __name__ == "__main__":
    main()
