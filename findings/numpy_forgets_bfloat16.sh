#!/usr/bin/env bash
# np.save and np.load of numpy 2.4.6 lose the dtype of arrays of ml_dtypes 0.6.0, without an error.
#
# np.save writes bfloat16 as '<V2' and the types of 8 bits or fewer as '<V1' (void: bytes without a meaning). np.load returns
# an array of dtype V2 or V1. The bytes are right: `loaded.view(ml_dtypes.bfloat16)` has the numbers, for who knows the dtype.
# Types of 4 bits, such as float4_e2m1fn, take a byte for each element, in memory and in the file.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" numpy==2.4.6 ml_dtypes==0.6.0 <<'PYTHON'
import ml_dtypes
import numpy

for name, stored, bytes_of_four in (("bfloat16", "V2", 8), ("float8_e4m3fn", "V1", 4), ("float4_e2m1fn", "V1", 4)):
    dtype = numpy.dtype(getattr(ml_dtypes, name))
    saved = numpy.array([1, 2, -1, 0.5], dtype)
    numpy.save("saved.npy", saved)
    loaded = numpy.load("saved.npy")
    same = bool((loaded.view(dtype) == saved).all())
    print(f"{name}: loaded as {loaded.dtype}, {loaded.nbytes} bytes; the same numbers as a view: {same}")
    assert (str(loaded.dtype), loaded.nbytes, same) == (f"|{stored}", bytes_of_four, True)
PYTHON
