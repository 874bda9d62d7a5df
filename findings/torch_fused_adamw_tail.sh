#!/usr/bin/env bash
# torch 2.15.0 on x86-64 with AVX2: AdamW(fused=True) updates the last n mod 8 elements of a tensor by another formula.
#
# exp_avg_sq is beta2 * v + (1 - beta2) * g * g, and the result depends on which of the operations are fused, that is rounded
# once. For whole vectors of 8 floats, torch computes fma((1 - beta2) * g, g, beta2 * v); for the rest of the tensor
# fma(v, beta2, (1 - beta2) * g * g). So equal elements with equal gradients get unequal second moments, only because of their
# place: the same weights in a tensor with a multiple of 8 elements, or in another sharding, train to other bits.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" torch==2.15.0 numpy==2.4.6 <<'PYTHON'
import numpy
import torch

if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
    raise SystemExit("skipped: this processor has no AVX2")
torch.set_num_threads(1)


def second_moments(gradients):
    weights = torch.nn.Parameter(torch.ones(gradients.shape[1]))
    optimizer = torch.optim.AdamW([weights], fused=True)
    for gradient in gradients:
        weights.grad = gradient.clone()
        optimizer.step()
    return optimizer.state[weights]["exp_avg_sq"].numpy()


# A tensor of 8000 elements, and the same elements as 2000 tensors of 4, which have nothing but a rest.
gradients = torch.randn(3, 8000, generator=torch.Generator().manual_seed(1))
whole = second_moments(gradients)
alone = numpy.concatenate([second_moments(gradients[:, at : at + 4]) for at in range(0, 8000, 4)])


def fma(a, b, c):
    """Of floats: the product is exact in double precision, and rounding twice is rare enough not to be met here."""
    return (a.astype(numpy.float64) * b.astype(numpy.float64) + c.astype(numpy.float64)).astype(numpy.float32)


beta, rest = numpy.float32(0.999), numpy.float32(1 - 0.999)
of_vectors, of_rest = numpy.zeros(8000, numpy.float32), numpy.zeros(8000, numpy.float32)
for g in gradients.numpy():
    of_vectors = fma(rest * g, g, of_vectors * beta)
    of_rest = fma(of_rest, numpy.full_like(g, beta), (rest * g) * g)
print("elements that differ, of 8000:")
print("  in one tensor, or in tensors of 4:      ", (whole != alone).sum())
print("  from the formula of whole vectors:      ", (whole != of_vectors).sum(), "in one tensor,", (alone != of_vectors).sum(), "in tensors of 4")
print("  from the formula of the rest:           ", (whole != of_rest).sum(), "in one tensor,", (alone != of_rest).sum(), "in tensors of 4")
assert (whole != alone).sum() > 500
assert (whole != of_vectors).sum() <= 1 and (alone != of_rest).sum() <= 1
PYTHON
