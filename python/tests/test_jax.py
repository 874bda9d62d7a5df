"""JAX arrays are loaded as they were saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorcask


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_arrays_come_back(dtype, memory):
    values = jnp.asarray(np.arange(24).reshape(4, 6) % 7).astype(dtype)
    state = {"params": {"w": values, "turned": values.T, "scalar": values[0, 1], "empty": values[:0]}, "step": 3}
    tensorcask.save(state, memory, step=3)
    loaded = tensorcask.load(memory)
    assert loaded["step"] == 3
    for name, value in state["params"].items():
        again = loaded["params"][name]
        assert isinstance(again, jax.Array) and again.dtype == value.dtype and again.shape == value.shape
        assert np.asarray(again).tobytes() == np.asarray(value).tobytes()


def test_what_jax_would_narrow_is_an_error(memory):
    tensorcask.save({"w": np.arange(3, dtype=np.int64)}, memory, step=1)
    with pytest.raises(tensorcask.UnsupportedError, match="jax_enable_x64"):
        tensorcask.load(memory, framework="jax")
    assert tensorcask.load(memory, framework="numpy")["w"].dtype == np.int64


def test_typed_keys_are_refused_by_name(memory):
    state = {"rng": [jax.random.key(0)]}
    with pytest.raises(TypeError, match=r"state\['rng'\]\[0\]: a key of jax.random; store jax.random.key_data"):
        tensorcask.save(state, memory, step=1)
    key_data = lambda path, value: jax.random.key_data(value)
    tensorcask.save(state, memory, step=1, on_unsupported=key_data)
    again = jax.random.wrap_key_data(tensorcask.load(memory)["rng"][0])
    assert (jax.random.bits(again) == jax.random.bits(state["rng"][0])).all()


def test_a_device_is_chosen(memory):
    device = jax.devices("cpu")[0]
    tensorcask.save({"w": jnp.ones(3)}, memory, step=1)
    assert tensorcask.load(memory, device=device)["w"].devices() == {device}
