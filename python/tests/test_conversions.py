"""Loading as another floating-point type: converted tensors, and tensors that keep their type."""

import numpy as np
import pytest
import tensorcask
import torch
from tensorcask import RawTensor


def training_state():
    generator = torch.Generator().manual_seed(3)
    return {
        "model": {"w": torch.randn(6, 4, generator=generator), "scale": torch.tensor(1.001), "seen": torch.tensor([1003])},
        "master": {"w": torch.randn(6, 4, generator=generator)},
        "optimizer": {
            "state": {
                0: {
                    "exp_avg": torch.randn(6, 4, generator=generator),
                    "exp_avg_sq": torch.rand(6, 4, generator=generator),
                    "step": torch.tensor(1003.0),
                },
                1: {"exp_avg": torch.randn(2, generator=generator), "step": torch.full((1,), 1003.0)},
            }
        },
        "other": {"step": torch.full((2,), 1003.0)},
    }


def dtypes(state, path=()):
    """Returns the dtype of each tensor by its path."""
    if not isinstance(state, dict):
        return {".".join(map(str, path)): str(state.dtype).removeprefix("torch.")}
    return {name: dtype for key, value in state.items() for name, dtype in dtypes(value, (*path, key)).items()}


KEPT = {
    "model.scale": "float32",
    "model.seen": "int64",
    "optimizer.state.0.step": "float32",
    "optimizer.state.1.step": "float32",
    "other.step": "float32",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "bf16", "float16", np.float64, float])
def test_counters_and_scalars_keep_their_values(dtype, memory):
    state = training_state()
    tensorcask.save(state, memory, step=1)
    loaded = tensorcask.load(memory, dtype=dtype)
    found = dtypes(loaded)
    assert {name: found[name] for name in KEPT} == KEPT
    (converted,) = {dtype for name, dtype in found.items() if name not in KEPT}
    assert converted in str(dtype) or str(dtype) in ("bf16", "<class 'float'>")
    assert loaded["optimizer"]["state"][0]["step"] == 1003 and loaded["other"]["step"].tolist() == [1003, 1003]
    assert torch.equal(loaded["model"]["w"], state["model"]["w"].to(getattr(torch, converted)))


def test_a_mapping_converts_by_role_and_name(memory):
    state = training_state()
    state["tied"] = state["model"]["w"]
    tensorcask.save(state, memory, step=1)

    def found(rules, **options):
        return {name: dtype for name, dtype in dtypes(tensorcask.load(memory, dtype=rules, **options)).items() if dtype not in ("float32", "int64")}

    assert found({"exp_avg": torch.bfloat16}) == {"optimizer.state.0.exp_avg": "bfloat16", "optimizer.state.1.exp_avg": "bfloat16"}
    everything = {"model.w", "tied", "master.w", "optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg", "optimizer.state.0.exp_avg_sq"}
    assert found({"*": "f16"}) == dict.fromkeys(everything, "float16")
    rules = {"*": "f16", "optimizer.state.0.*": "bf16", "exp_avg_sq": None}
    assert found(rules) == dict.fromkeys(everything - {"optimizer.state.0.exp_avg_sq"}, "float16") | {"optimizer.state.0.exp_avg": "bfloat16"}
    # The whole name is taken literally.
    assert found({"model.scale": "bf16", "*": None}) == {"model.scale": "bfloat16"}
    # Tied tensors that get different types are no longer tied.
    loaded = tensorcask.load(memory, dtype={"tied": "bf16"})
    assert (loaded["tied"].dtype, loaded["model"]["w"].dtype) == (torch.bfloat16, torch.float32)
    assert found({"model": "bf16"}, tensors="master.*") == {}
    # An unknown role is accepted; an unknown name is an error.
    assert found({"momentum": "bf16"}) == {}
    with pytest.raises(tensorcask.TemplateError, match="dtype: .*`modle.w`"):
        tensorcask.load(memory, dtype={"modle.w": "bf16"})
    with pytest.raises(ValueError, match="dtype: "):
        tensorcask.load(memory, dtype={"[": "bf16"})


def test_numpy_is_converted_and_bytes_are_not(memory):
    state = {"w": np.arange(6, dtype=np.float32), "n": np.arange(3)}
    tensorcask.save(state, memory, step=1)
    assert dtypes(tensorcask.load(memory, dtype="bf16")) == {"w": "bfloat16", "n": "int64"}
    assert dtypes(tensorcask.load(memory, dtype=np.dtype(np.float16))) == {"w": "float16", "n": "int64"}
    with pytest.raises(tensorcask.InvalidArgumentError, match="`w`.*framework"):
        tensorcask.load(memory, dtype="f16", framework="bytes")
    tensorcask.save({"n": RawTensor("u8", (3,), bytearray(3))}, memory, step=2)
    assert tensorcask.load(memory, dtype="f16")["n"].dtype == "u8"


def test_tensors_of_out_keep_their_type(memory):
    state = training_state()
    tensorcask.save(state, memory, step=1)
    out = {"model": {"w": torch.zeros(6, 4)}}
    loaded = tensorcask.load(memory, out=out, dtype=torch.bfloat16)
    assert loaded["model"]["w"] is out["model"]["w"] and torch.equal(out["model"]["w"], state["model"]["w"])
    assert loaded["master"]["w"].dtype == torch.bfloat16
