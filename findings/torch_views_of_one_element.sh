#!/usr/bin/env bash
# torch 2.15.0 calls a tensor of one element contiguous with any stride, and then refuses to view it as bytes.
#
# `x[::6]` of six numbers has one element and a stride of 6. `is_contiguous()` is true, so `contiguous()`, `reshape(-1)` and
# `clone()` return the same stride, and `view(torch.uint8)` raises "stride(-1) must be 1". A program that saves tensors as bytes, with
# `contiguous()` first, works for all shapes but this one. `as_strided((1,), (1,))` helps. numpy 2.4.6 calls the same
# array contiguous, too, and views it as bytes.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" torch==2.15.0 numpy==2.4.6 <<'PYTHON'
import numpy
import torch

one, two = torch.arange(6.0)[::6], torch.arange(6.0)[::3]
assert (one.shape, one.stride(), one.is_contiguous(), two.is_contiguous()) == ((1,), (6,), True, False)
assert one.contiguous().stride() == one.reshape(-1).stride() == one.clone().stride() == (6,)
try:
    said = str(one.contiguous().view(torch.uint8).tolist())
except RuntimeError as error:
    said = str(error)
print(f"torch, one element:  {said}")
assert "stride(-1) must be 1" in said, said
assert two.contiguous().view(torch.uint8).numel() == 8
assert one.as_strided((1,), (1,)).view(torch.uint8).tolist() == [0, 0, 0, 0]

array = numpy.arange(6, dtype=numpy.float32)[::6]
assert array.flags.c_contiguous and array.strides == (24,)
print(f"numpy, one element:  {array.view(numpy.uint8).tolist()}")
PYTHON
