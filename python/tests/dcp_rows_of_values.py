"""Rows of one process: values, tensors, loading. See `dcp_rows`."""

import collections
import enum
import io
import os

import torch
import torch.distributed.checkpoint as dcp
from dcp_rows import error_of, kind_of_error, plain, row

DTYPES = "bfloat16 float16 float32 float64 int8 uint8 int16 uint16 int32 int64 bool complex64 complex128 float8_e4m3fn float8_e5m2".split()
SAFE = "tensorcask stores no pickle, because loading a pickle runs code."


def weights(value=1.0):
    return {"w": torch.full((4, 3), value), "b": torch.arange(3.0) * value}


def nested(value):
    return {
        "model": weights(value),
        "optimizer": {
            "state": {"w": {"exp_avg": torch.full((4,), value), "step": torch.tensor(value)}},
            "param_groups": [{"lr": value, "betas": (0.9, value)}],
        },
        "list": [torch.full((2,), value), {"deep": torch.full((1,), value)}, int(value)],
        "text": str(value),
        "none": None if value else 5,
    }


@row("Values")
def nested_state(side):
    """A nested state of dicts, lists, tuples, numbers and text comes back in a template."""
    side.save(nested(3.0))
    return side.load(nested(0.0))


@row("Values")
def without_template(side):
    """`_load_state_dict_from_keys()` rebuilds the whole state without a template."""
    side.save(nested(3.0))
    return sorted(plain(side.load_keys()).items())


@row("Values")
def named_part(side):
    """`_load_state_dict_from_keys("model")` rebuilds one part."""
    side.save(nested(3.0))
    return side.load_keys("model")


@row("Values")
def named_inner_part(side):
    """`_load_state_dict_from_keys("optimizer.state")` leaves out `param_groups`."""
    side.save(nested(3.0))
    return side.load_keys({"optimizer.state"})


@row("Values")
def integer_keys_in_a_template(side):
    """Integer keys become text in the checkpoint, and fill integer keys of tensors in a template."""
    side.save({"opt": {7: torch.ones(2), 8: torch.full((1,), 2.0)}})
    return side.load({"opt": {7: torch.zeros(2), 8: torch.zeros(1)}})


@row("Values", differs="PyTorch adds a second key, `'7'`, for values that are not tensors.")
def integer_keys_of_values(side):
    """Integer keys of values that are not tensors."""
    side.save({"opt": {7: 1.5}})
    return side.load({"opt": {7: 0.0}})


@row("Values")
def integer_keys_without_template(side):
    """Integer keys are text without a template."""
    side.save({"opt": {7: torch.ones(2)}, "steps": {1: 0.5}})
    return side.load_keys()


@row("Values")
def dots_in_keys(side):
    """A key with a dot is told apart from a nested key."""
    side.save({"a.b": torch.ones(2), "c": {"d.e": torch.full((1,), 3.0)}})
    return side.load({"a.b": torch.zeros(2), "c": {"d.e": torch.zeros(1)}})


@row("Values")
def colliding_keys(side):
    """Keys that flatten to one name are an error of PyTorch's planner."""
    return error_of(lambda: side.save({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}), full=True)


@row("Values")
def empty_state(side):
    """An empty state saves and loads."""
    side.save({})
    return side.load({})


@row("Values")
def empty_containers(side):
    """Empty dicts, lists and tuples come back."""
    side.save({"a": {}, "b": [], "c": (), "w": torch.ones(1)})
    return side.load({"a": {}, "b": [], "c": (), "w": torch.zeros(1)})


@row("Values")
def plain_values(side):
    """Numbers, infinities, text, bytes, booleans and None come back."""
    state = {"i": -(2**62), "f": 1e-300, "inf": float("-inf"), "text": "ä\n", "bytes": b"\0\xff", "yes": True, "none": None}
    side.save(state)
    return side.load(dict.fromkeys(state))


@row("Values")
def streams(side):
    """`io.BytesIO` comes back, to be read from the start."""
    side.save({"rng": io.BytesIO(b"state")})
    return side.load({"rng": io.BytesIO()})["rng"].read()


@row("Values")
def tuples_of_tensors(side):
    """A tuple with tensors is one value."""
    side.save({"pair": (torch.ones(2), 3)})
    return side.load({"pair": None})


@row("Values", differs=SAFE)
def python_sets(side):
    """A set as a value."""
    return kind_of_error(lambda: [side.save({"w": torch.ones(1), "tags": {1}}), "saved"][1])


class Facts:
    def __init__(self):
        self.loss = 0.5


@row("Values", differs=SAFE)
def objects(side):
    """An object of a class of the program."""
    return kind_of_error(lambda: [side.save({"facts": Facts()}), "saved"][1])


class Phase(enum.IntEnum):
    WARMUP = 1


@row("Values", differs="A store keeps the value, not the class.")
def subclasses(side):
    """Ordered dicts inside values, and enums."""
    side.save({"phase": Phase.WARMUP, "pair": ({"a": collections.OrderedDict(b=1)},)})
    loaded = side.load({"phase": None, "pair": None})
    return f"{type(loaded['phase']).__name__}, {type(loaded['pair'][0]['a']).__name__}"


@row("Values", differs="PyTorch unpickles values with `weights_only=False`.")
def code_in_a_checkpoint(side):
    """A checkpoint that was made to run code when it is loaded."""
    marker = side.folder / "ran"

    class Trap:
        def __reduce__(self):
            return (os.makedirs, (str(marker),))

    try:
        side.save({"trap": Trap()})
        side.load({"trap": None})
    except BaseException:
        return "refused to save"
    return "ran code" if marker.exists() else "loaded"


@row("Values")
def numpy_arrays(side):
    """numpy arrays, alone, in a tuple and without a template, come back as numpy arrays."""
    import numpy as np

    side.save({"a": np.arange(3), "rng": ("MT19937", np.arange(2, dtype=np.uint32), 7)})
    loaded = [side.load({"a": np.zeros(3), "rng": None}), side.load({"a": None, "rng": None}), side.load_keys()]
    return [(type(state["a"]).__name__, state["a"].tolist(), state["rng"][0], str(state["rng"][1].dtype), state["rng"][1].tolist()) for state in loaded]


@row("Values", differs="A numpy scalar becomes an array without dimensions.")
def numpy_scalars(side):
    """A numpy scalar as a value."""
    import numpy as np

    side.save({"scalar": np.float32(0.5)})
    return type(side.load({"scalar": None})["scalar"]).__name__


@row("Tensors")
def dtypes(side):
    """15 dtypes come back bit for bit: bf16, f16, f32, f64, all integers, bool, complex, two 8-bit floats."""
    made = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in DTYPES}
    side.save(made)
    return side.load({name: torch.zeros_like(tensor) for name, tensor in made.items()})


@row("Tensors")
def scalars_and_empty_tensors(side):
    """Tensors without dimensions and without elements come back."""
    side.save({"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "n": torch.tensor(7)})
    return side.load({"scalar": torch.tensor(0.0), "empty": torch.empty(0, 4), "n": torch.tensor(0)})


@row("Tensors")
def strided_tensors(side):
    """Transposed, strided and expanded tensors are saved as they look, and filled in place."""
    base = torch.arange(24.0).reshape(4, 6)
    side.save({"t": base.t(), "s": base[::2, 1::2], "e": torch.ones(1, 3).expand(2, 3)})
    into = torch.zeros(4, 6)
    loaded = side.load({"t": into.t(), "s": torch.zeros(2, 3), "e": torch.zeros(2, 3)})
    return loaded, into


@row("Tensors")
def conjugates(side):
    """Conjugated and negated views come back as values."""
    values = torch.tensor([1 + 2j, 3 - 1j])
    side.save({"conj": values.conj(), "neg": values.conj().imag})
    return side.load({"conj": torch.zeros(2, dtype=torch.complex64), "neg": torch.zeros(2)})


@row("Tensors")
def parameters(side):
    """A parameter is filled in place, and stays a leaf that requires a gradient."""
    side.save({"p": torch.nn.Parameter(torch.ones(3))})
    parameter = torch.nn.Parameter(torch.zeros(3))
    loaded = side.load({"p": parameter})
    return loaded["p"] is parameter, parameter.requires_grad, parameter.is_leaf, parameter


@row("Tensors")
def tied_tensors(side):
    """Two names of one tensor fill one tensor."""
    shared = torch.arange(4.0)
    side.save({"a": shared, "b": shared})
    into = torch.zeros(4)
    side.load({"a": into, "b": into})
    return into


@row("Tensors")
def conversion(side):
    """A load converts to the dtype of the template: f32 to bf16, bf16 to f32, int64 to f32."""
    side.save({"a": torch.arange(5) / 3, "b": torch.arange(5).bfloat16(), "c": torch.arange(5)})
    return side.load({"a": torch.zeros(5, dtype=torch.bfloat16), "b": torch.zeros(5), "c": torch.zeros(5)})


@row("Tensors", differs="tensorcask names the tensor and the reason.")
def meta_tensors(side):
    """A tensor without data in the state to save."""
    return error_of(lambda: side.save({"a": {"w": torch.empty(3, device="meta")}}), full=True)[:150]


@row("Tensors", differs="tensorcask has no sparse layout. Save indices and values.")
def sparse_tensors(side):
    """A sparse tensor."""
    return kind_of_error(lambda: [side.save({"s": torch.ones(3).to_sparse()}), "saved"][1])


@row("Loading")
def in_place(side):
    """Tensors and containers of the template stay the same objects."""
    side.save(nested(2.0))
    state = nested(0.0)
    model, tensor = state["model"], state["model"]["w"]
    side.load(state)
    return state["model"] is model, state["model"]["w"] is tensor, tensor


@row("Loading")
def order_of_keys(side):
    """The order of keys does not matter."""
    side.save({"a": torch.ones(1), "b": torch.full((1,), 2.0), "c": 3})
    return sorted(plain(side.load({"c": 0, "b": torch.zeros(1), "a": torch.zeros(1)})).items())


@row("Loading")
def part_of_a_checkpoint(side):
    """A template with some keys loads these; other keys of the checkpoint are ignored."""
    side.save(nested(2.0))
    return side.load({"model": {"b": torch.zeros(3)}})


@row("Loading")
def missing_key(side):
    """A key that the checkpoint does not have is an error."""
    side.save(weights())
    return error_of(lambda: side.load(weights(0.0) | {"absent": torch.zeros(1)}), full=True)


@row("Loading")
def allow_partial_load(side):
    """With `allow_partial_load=True` a missing key keeps its value."""
    side.save(weights(2.0))
    return side.load(weights(0.0) | {"absent": torch.full((1,), 9.0)}, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))


@row("Loading")
def wrong_size(side):
    """A tensor of another size is an error with the same text."""
    side.save(weights())
    return error_of(lambda: side.load({"w": torch.zeros(4, 4)}), full=True)


@row("Loading")
def tensor_into_a_value(side):
    """A stored tensor for a template value that is none."""
    side.save({"x": torch.ones(2)})
    return error_of(lambda: side.load({"x": 5}))


@row("Loading")
def value_into_a_tensor(side):
    """A stored value for a template tensor replaces the tensor."""
    side.save({"x": 5})
    return side.load({"x": torch.ones(2)})


@row("Loading")
def missing_checkpoint(side):
    """A checkpoint that does not exist is an error."""
    side.save(weights())
    return error_of(lambda: side.load(weights(), step=2))


class Counter:
    def __init__(self):
        self.value, self.calls = torch.zeros(2), []

    def state_dict(self):
        self.calls.append("state_dict")
        return {"value": self.value}

    def load_state_dict(self, state):
        self.calls.append("load_state_dict")
        self.value = state["value"]


@row("Loading")
def stateful_objects(side):
    """`state_dict` and `load_state_dict` of a `Stateful` are called, and it stays in the template."""
    counter = Counter()
    counter.value.fill_(4.0)
    side.save({"counter": counter})
    other = Counter()
    state = side.load({"counter": other})
    return state["counter"] is other, other.value, counter.calls, other.calls


class Noting(dict):
    changes = 0

    def __setitem__(self, key, value):
        self.changes += 1
        super().__setitem__(key, value)


@row("Loading")
def mappings_of_other_classes(side):
    """A template of a subclass of dict gets plain values by assignment, and keeps its `Stateful` ones."""
    side.save({"plain": {"w": torch.ones(2)}, "counter": Counter()})
    state = Noting(plain={"w": torch.zeros(2)}, counter=Counter())
    side.load(state)
    return state.changes, state["plain"]
