#!/usr/bin/env bash
# torch 2.15.0 turns numbers that are too large for float8_e4m3fn into 448, and ml_dtypes 0.6.0 turns them into NaN.
#
# The greatest number of float8_e4m3fn is 448, and it has no infinity. torch saturates since 2026 (pull request 178817): 465, 1e9
# and infinity become 448. JAX, through ml_dtypes, makes NaN of all above 464, as torch did before. float8_e5m2 has infinities,
# and both agree on it: 61440 and above become infinity. So a state that is rounded to 8 bits by two frameworks, or by two
# versions of torch, differs just where it overflows, and only one of them shows the overflow.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" torch==2.15.0 numpy==2.4.6 ml_dtypes==0.6.0 <<'PYTHON'
import ml_dtypes
import numpy
import torch

numbers = numpy.array([447.0, 464.0, 465.0, 61440.0, 1e9, numpy.inf], numpy.float32)
found = {}
for name in ("float8_e4m3fn", "float8_e5m2"):
    of_torch = torch.from_numpy(numbers).to(getattr(torch, name)).float().tolist()
    of_ml_dtypes = numbers.astype(getattr(ml_dtypes, name)).astype(numpy.float32).tolist()
    found[name] = str(of_torch), str(of_ml_dtypes)
    print(f"{name} of {numbers.tolist()}:\n  torch     {of_torch}\n  ml_dtypes {of_ml_dtypes}")
saturated = "[448.0, 448.0, 448.0, 448.0, 448.0, 448.0]"
assert found["float8_e4m3fn"] == (saturated, "[448.0, 448.0, nan, nan, nan, nan]")
assert found["float8_e5m2"] == ("[448.0, 448.0, 448.0, inf, inf, inf]",) * 2
PYTHON
