"""States are loaded as they were saved, bit for bit."""

import collections
import datetime
import enum
import io
import math
import struct
import threading

import ml_dtypes
import numpy as np
import pytest
import tensorcask
import torch
import torch.distributed.checkpoint
from tensorcask import _native, _options, _state
from tensorcask._frameworks import BITS, DTYPES, RawTensor, byte_count

TORCH_DTYPES = sorted(
    name
    for name, ours in DTYPES.items()
    if isinstance(getattr(torch, name, None), torch.dtype) and not (BITS[ours] < 8 and not name.endswith("_x2"))
)
NUMPY_DTYPES = sorted(name for name in DTYPES if not name.endswith("_x2"))


def random_bytes(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def torch_tensor(name, shape, seed=0):
    """Returns arbitrary bits, including NaNs with payloads."""
    dtype = getattr(torch, name)
    size = torch.empty(shape, dtype=dtype)
    data = random_bytes(size.numel() * size.element_size(), seed)
    if name == "bool":
        data &= 1
    return torch.from_numpy(data).view(dtype).reshape(shape) if size.numel() else size


def torch_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_every_dtype_of_torch_is_tried():
    assert {DTYPES[name] for name in TORCH_DTYPES} >= {"bool", "bf16", "f16", "f32", "f64", "c64", "c128", "u64", "f8_e4m3", "f8_e8m0", "f4_e2m1"}
    assert set(DTYPES.values()) == {name for name, _ in _native.dtypes()}


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_tensors_come_back_bit_for_bit(name, memory):
    state = {
        "matrix": torch_tensor(name, (37, 6)),
        "scalar": torch_tensor(name, ()) if name != "float4_e2m1fn_x2" else torch_tensor(name, (1,)),
        "empty": torch_tensor(name, (0, 4)),
        "row": torch_tensor(name, (5,), 1),
    }
    if name != "float4_e2m1fn_x2":
        state |= {"transposed": torch_tensor(name, (4, 6)).t(), "strided": torch_tensor(name, (12,))[::3]}
    for step in (1, 2):
        tensorcask.save(state, memory, step=step, policy="consecutive")
        if step == 1:
            state["matrix"] = torch_tensor(name, (37, 6), 2)
    loaded = tensorcask.load(memory)
    assert list(loaded) == list(state)
    for key, tensor in state.items():
        assert loaded[key].dtype == tensor.dtype and loaded[key].shape == tensor.shape, key
        assert torch_bytes(loaded[key]) == torch_bytes(tensor), key
    assert tensorcask.Store(memory).verify().is_clean


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_numpy_arrays_come_back_bit_for_bit(name, memory):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    bits = BITS[DTYPES[name]]

    def array(shape, seed=0):
        count = math.prod(shape)
        data = random_bytes(count * dtype.itemsize, seed)
        if name == "bool":
            data &= 1
        if bits < 8:
            # One element per byte, in the form of the type's own conversions.
            data = (data & (1 << bits) - 1).astype(np.uint8)
            if name == "int4":
                data = np.where(data > 7, data | 0xF0, data).astype(np.uint8)
        return data.view(dtype).reshape(shape)

    state = {"matrix": array((7, 5)), "scalar": array(()), "empty": array((3, 0)), "turned": array((4, 6)).T, "big": array((9,), 3)[::2]}
    tensorcask.save(state, memory, step=1)
    loaded = tensorcask.load(memory)
    for key, value in state.items():
        assert loaded[key].dtype == dtype and loaded[key].shape == value.shape, key
        assert loaded[key].tobytes() == value.tobytes(), key
    if bits < 8:
        again = tensorcask.load(memory, slices={"matrix": (slice(2, 5), slice(1, 4))})["matrix"]
        assert again.tobytes() == state["matrix"][2:5, 1:4].tobytes()


def test_big_endian_arrays_keep_their_values(memory):
    value = np.arange(6, dtype=">f4").reshape(2, 3)
    tensorcask.save({"w": value}, memory, step=1)
    assert (tensorcask.load(memory)["w"] == value).all()
    out = np.empty((2, 3), ">f4")
    tensorcask.load(memory, out={"w": out})
    assert (out == value).all()


def test_nesting_and_values_come_back(memory):
    state = {
        "model": {"layers": [{"w": torch.ones(3)}, {"w": torch.zeros(2, dtype=torch.bfloat16)}], "empty": {}, "none": []},
        "numbers": [0, -1, 2**200, 1.5, -0.0, math.inf, -math.inf, 1e-320, True, False, None],
        "text": ["", "ünïcode", "line\nbreak", "\u0000\u001f\"\\"],
        "bytes": [b"", b"\x00\xff"],
        "pair": (1, ("a", ())),
        7: {-3: "integer keys", "7": "and text that looks like them"},
        "a.b": torch.ones(1),
        "a": {"c": torch.zeros(1), "b#2": torch.full((1,), 2.0)},
        "tc": {"x": torch.full((1,), 5.0)},
        "": {"": 1},
        "numpy": np.float32(2.5),
        "extra": io.BytesIO(b"_extra_state"),
    }
    tensorcask.save(state, memory, step=0)
    loaded = tensorcask.load(memory)
    assert list(loaded) == list(state)
    assert loaded["extra"].read() == b"_extra_state"
    assert torch.equal(loaded["a.b"], torch.ones(1)) and torch.equal(loaded["a"]["c"], torch.zeros(1))
    assert loaded["a"]["b#2"].item() == 2 and loaded["tc"]["x"].item() == 5
    for key in ("numbers", "text", "bytes", "pair", 7, ""):
        assert loaded[key] == state[key], key
        assert repr(loaded[key]) == repr(state[key]), key
    assert loaded["model"]["layers"][1]["w"].dtype == torch.bfloat16 and loaded["model"]["empty"] == {}
    assert loaded["numpy"].dtype == np.float32 and loaded["numpy"] == 2.5

    payload = struct.unpack("<d", bytes.fromhex("0123456789abf87f"))[0]
    tensorcask.save([payload], memory, step=1)
    assert struct.pack("<d", tensorcask.load(memory)[0]).hex() == "0123456789abf87f"


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}},
        {0: torch.zeros(2), "0": torch.ones(2)},
        {"layers": [torch.zeros(2)], "layers.0": torch.ones(2)},
        {"tc.x": torch.zeros(2), "#tc": {"x": torch.ones(2)}},
        {"": torch.zeros(2), "#": torch.ones(2)},
    ],
)
def test_two_tensors_of_one_name_are_refused(state, memory):
    for order in (state, dict(reversed(state.items()))):
        with pytest.raises(ValueError, match="both tensors would have the name .*Rename one of the keys"):
            tensorcask.save(order, memory, step=1)
    # Values are found by their place in the state, so they need no names.
    values = {"a.b": b"1", "a": {"b": b"2"}, 0: 1, "0": 2}
    tensorcask.save(values, memory, step=1)
    assert tensorcask.load(memory) == values


def test_a_template_finds_tensors_by_their_paths(memory):
    """A store of an earlier version, which called the second of two tensors of one name `a.b#2`."""
    one, two = torch.zeros(2), torch.ones(2)
    nodes = [("dict", ["a.b", "a"]), ("tensor", ("a.b", "torch")), ("dict", ["b"]), ("tensor", ("a.b#2", "torch"))]
    flat = _state.flatten({"a.b": one, "a.b#2": two})
    store = tensorcask.Store(memory)
    blobs = [("tc.tree", _native.encode_tree(nodes))]
    store.with_writer(_options.writer_options("full"), lambda writer: writer.save(1, flat.whole_tensors(), blobs, "{}", {}))
    templates = ({"a": {"b": torch.empty(2)}, "a.b": torch.empty(2)}, {"a": {"b": torch.empty(2)}}, {"a.b": torch.empty(2)})
    for template in templates:
        tensorcask.load(store, out=template)
        assert torch.equal(template["a"]["b"], two) if "a" in template else True
        assert torch.equal(template["a.b"], one) if "a.b" in template else True

    # DCP saves integer keys as text.
    tensorcask.save({"0": one, "list": {"1": two}}, memory, step=2)
    template = {0: torch.ones(2), "list": {1: torch.zeros(2)}}
    tensorcask.load(memory, 2, out=template)
    assert torch.equal(template[0], one) and torch.equal(template["list"][1], two)
    with pytest.raises(tensorcask.TemplateError, match=r"state\['0'\] and state\[0\] are both tensor `0`"):
        tensorcask.load(memory, 2, out={"0": torch.ones(2), 0: torch.ones(2)})
    with pytest.raises(tensorcask.TemplateError, match="step 2 has no tensor `new`. Nothing was filled"):
        tensorcask.load(memory, 2, out={"0": torch.ones(2), "new": torch.ones(2)})


def test_an_optimizer_state_comes_back(memory):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    tensorcask.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, memory, step=1)
    loaded = tensorcask.load(memory)
    again = torch.optim.AdamW(model.parameters(), lr=1.0)
    again.load_state_dict(loaded["optimizer"])
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for key, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(again.state_dict()["state"][key][name], value)
    roles = {info.role for info in tensorcask.Store(memory).snapshot().tensors().values()}
    assert {"model", "exp_avg", "exp_avg_sq"} <= roles


def test_tied_tensors_are_stored_once(memory):
    w = torch.arange(10_000.0).reshape(100, 100)
    turned = w.t()
    state = {"a": w, "b": w, "c": turned, "d": w.t(), "alone": w.clone()}
    tensorcask.save(state, memory, step=1)
    infos = tensorcask.Store(memory).snapshot().tensors()
    assert {name: info.alias_of for name, info in infos.items()} == {"a": None, "alone": None, "b": "a", "c": None, "d": "c"}
    loaded = tensorcask.load(memory)
    assert loaded["a"] is loaded["b"] and loaded["c"] is loaded["d"] and loaded["a"] is not loaded["alone"]
    for name, value in state.items():
        assert torch.equal(loaded[name], value)
    shared = torch.zeros(100, 100)
    out = {"a": shared, "b": shared, "alone": torch.zeros(100, 100)}
    tensorcask.load(memory, out=out)
    assert torch.equal(shared, w)
    with pytest.raises(ValueError, match="share memory"):
        tensorcask.load(memory, out={"a": shared, "alone": shared})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: torch.empty(3, device="meta"), "meta tensor"),
        (lambda: torch.ones(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(2, dtype=torch.complex32), "complex32"),
        (lambda: np.array(["a"]), "dtype <U1"),
        (lambda: np.array([object()]), "dtype object"),
        (lambda: np.zeros(2, [("x", "i4")]), "cannot be stored"),
        (lambda: np.ma.masked_array([1], [True]), "masked"),
        (lambda: np.longdouble(1), "cannot be stored"),
        (lambda: np.zeros(1, ml_dtypes.float8_e4m3), "float8_e4m3 cannot"),
        (lambda: {1, 2}, "builtins.set"),
        (lambda: torch.nn.Linear(1, 1), "store its state_dict"),
        (lambda: {object: 1}, "a key is <class 'object'>. Keys may be strings, numbers, None, bytes, and tuples of these"),
        (lambda: {(1, 2): torch.ones(1)}, r"[(1, 2)]: a tensor under a key that is neither text nor an integer has no name"),
        (lambda: datetime.datetime(2026, 1, 1), "store its isoformat()"),
        (lambda: collections.ChainMap, "cannot be stored"),
        (lambda: "\ud800", "not valid Unicode"),
    ],
)
def test_what_cannot_be_stored_is_named(value, says, memory):
    state = {"fine": torch.ones(2), "outer": [0, {"bad": value()}]}
    with pytest.raises(TypeError) as caught:
        tensorcask.save(state, memory, step=1)
    assert "state['outer'][1]['bad']" in str(caught.value) and says in str(caught.value)
    with pytest.raises(tensorcask.NotFoundError):
        tensorcask.load(memory)

    tensorcask.save(state, memory, step=1, on_unsupported="skip")
    assert tensorcask.load(memory)["outer"] == [0, {}]
    seen = []
    tensorcask.save(state, memory, step=2, on_unsupported=lambda path, value: seen.append(path) or "replaced")
    assert tensorcask.load(memory)["outer"][1] == {"bad": "replaced"} and seen == ["state['outer'][1]['bad']"]
    with pytest.raises(TypeError, match="on_unsupported returned"):
        tensorcask.save(state, memory, step=3, on_unsupported=lambda path, value: value)


def test_subclasses_come_back_as_what_they_subclass(memory):
    Pair = collections.namedtuple("Pair", "x y")
    state = {"ordered": collections.OrderedDict(z=1, a=2), "pair": Pair(1, 2), "size": torch.Size([3, 4]), "parameter": torch.nn.Parameter(torch.ones(2))}
    tensorcask.save(state, memory, step=1)
    loaded = tensorcask.load(memory)
    assert loaded["ordered"] == {"z": 1, "a": 2} and list(loaded["ordered"]) == ["z", "a"]
    assert loaded["pair"] == (1, 2) and loaded["size"] == (3, 4)
    assert torch.equal(loaded["parameter"], torch.ones(2)) and not loaded["parameter"].requires_grad


def test_values_of_other_types_come_back_as_these(memory):
    """The table of the reference: values of Python, PyTorch and numpy."""
    values = {
        "counter": collections.Counter({2: 1, "a": 3}),
        "tuples": collections.Counter({(1, "a"): 2, None: 1}),
        "deque": collections.deque([1, (2, 3)]),
        "bounded": collections.deque([0.5, 1.5], 5),
        "keys": {0.5: "a", (1, ("x", None)): "b", True: "c", None: [1], b"k": {2.5: 1}, 7: 8},
        "dtypes": [torch.float32, torch.bfloat16, np.dtype("float64"), np.dtype("int8")],
        "devices": [torch.device("cpu"), torch.device("cuda", 1)],
        "complex": [1 + 2j, complex(-0.0, math.inf)],
        "large": [1 << 20_000, -(10**5000), 2**13_999],
        "nested": ({"c": collections.Counter("aab")}, collections.deque([collections.deque()])),
    }
    tensorcask.save({**values, "w": torch.ones(2)}, memory, step=1)
    loaded = tensorcask.load(memory)
    for key, value in values.items():
        # Text of such integers is refused by Python.
        assert loaded[key] == value, key
        assert key == "large" or repr(loaded[key]) == repr(value)
    assert type(loaded["keys"]) is dict and [type(key) for key in loaded["keys"]] == [float, tuple, bool, type(None), bytes, int]
    # Text and bytes of numpy are those of Python.
    tensorcask.save([np.str_("a"), np.bytes_(b"b"), {np.str_("k"): 1}], memory, step=2)
    loaded = tensorcask.load(memory, 2)
    assert loaded == ["a", b"b", {"k": 1}] and [type(value) for value in loaded[:2]] == [str, bytes]
    # Tensors in a deque have names and are filled.
    tensorcask.save({"last": collections.deque([torch.ones(2), torch.zeros(2)], 2)}, memory, step=3)
    out = {"last": collections.deque([torch.zeros(2), torch.ones(2)])}
    assert tensorcask.load(memory, 3, out=out)["last"].maxlen == 2
    assert torch.equal(out["last"][0], torch.ones(2)) and torch.equal(out["last"][1], torch.zeros(2))
    # A type that is unknown, or does not fit, leaves the value.
    for name, plain in (("a.type", {"a": 1}), ("complex", "x"), ("torch.dtype", "_dynamo"), ("collections.deque:-1", [1]), ("int", "0xg")):
        nodes = [("typed", name), *_state.flatten(plain).nodes]
        assert _state.build(_native.decode_tree(_native.encode_tree(nodes)), None) == plain


def test_multisteplr_goes_on_after_a_warm_up(memory):
    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
        schedules = torch.optim.lr_scheduler
        parts = [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.MultiStepLR(optimizer, [2, 4])]
        return optimizer, schedules.SequentialLR(optimizer, parts, [4])

    def rates(optimizer, schedule, count):
        found = []
        for _ in range(count):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    whole = rates(*made(), 10)
    optimizer, schedule = made()
    first = rates(optimizer, schedule, 2)
    tensorcask.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, memory, step=1)
    state = tensorcask.load(memory)
    optimizer, schedule = made()
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    assert first + rates(optimizer, schedule, 8) == whole


def test_thousands_of_small_values_come_back(memory):
    state = {"bytes": [number.to_bytes(3) for number in range(4000)], "files": {number: io.BytesIO(b"%d" % number) for number in range(4000)}}
    tensorcask.save(state, memory, step=1)
    loaded = tensorcask.load(memory)
    assert loaded["bytes"] == state["bytes"]
    assert all(file.getvalue() == b"%d" % number for number, file in loaded["files"].items())


def test_enums_of_integers_and_text_come_back_as_these(memory):
    class Phase(enum.IntEnum):
        WARMUP = 3

    class Flags(enum.IntFlag):
        A = 1
        B = 2

    class Mode(str, enum.Enum):
        EVAL = "eval"

    class Kind(enum.StrEnum):
        LORA = "lora"

    class Rate(float, enum.Enum):
        LOW = 0.5

    class Loud(str):
        def __str__(self):
            return "LOUD"

    values = [Phase.WARMUP, Flags.A | Flags.B, Mode.EVAL, Kind.LORA, Rate.LOW, Loud("quiet")]
    state = {"values": values, Mode.EVAL: 1, Phase.WARMUP: 2, Kind.LORA: torch.ones(2), Loud("quiet"): 4}
    tensorcask.save(state, memory, step=1)
    loaded = tensorcask.load(memory)
    assert loaded["values"] == [3, 3, "eval", "lora", 0.5, "quiet"]
    assert [type(value) for value in loaded["values"]] == [int, int, str, str, float, str]
    assert {key: type(key) for key in loaded} == {"values": str, "eval": str, 3: int, "lora": str, "quiet": str}
    assert (loaded["eval"], loaded[3], loaded["quiet"]) == (1, 2, 4) and torch.equal(loaded["lora"], torch.ones(2))

    class Plain(enum.Enum):
        X = 1

    for bad in ({"x": Plain.X}, {Plain.X: 1}):
        with pytest.raises(tensorcask.InvalidArgumentError, match="Plain"):
            tensorcask.save(bad, memory, step=2)


@pytest.mark.parametrize("as_numpy", [False, True])
def test_equal_views_of_one_memory_are_stored_once(as_numpy, memory):
    storage = torch.randn(3, 200, 100, generator=torch.Generator().manual_seed(0))
    storage = storage.numpy() if as_numpy else storage

    def turned(value):
        return value.T if as_numpy else value.t()

    def saved_bytes(step, state):
        return tensorcask.save(state, memory, step=step, policy="full").stored_bytes

    one = saved_bytes(1, {"a": storage[0]})
    assert one > 60_000
    # Views that were made one by one: of the same rows, the same columns, and the same turned matrix.
    views = {"a": storage[0], "b": storage[0], "c": storage[0][:, ::2], "d": storage[0][:, ::2], "e": turned(storage[0]), "f": turned(storage[0])}
    infos = {}
    for step, names, most in ((2, "ab", 1.1), (3, "abcd", 1.6), (4, "abcdef", 2.7)):
        assert saved_bytes(step, {name: views[name] for name in names}) < most * one
        infos = tensorcask.Store(memory).snapshot(step).tensors()
    assert [infos[name].alias_of for name in "abcdef"] == [None, "a", None, "c", None, "e"]
    loaded = tensorcask.load(memory, 4)
    assert loaded["a"] is loaded["b"] and loaded["c"] is loaded["d"] and loaded["e"] is loaded["f"]
    for name, view in views.items():
        assert (loaded[name] == view).all()


def test_overlapping_views_are_stored_apart(memory):
    """As documented: each tensor has the right values, but they no longer share memory."""
    storage = torch.randn(400, 100, generator=torch.Generator().manual_seed(0))
    one = tensorcask.save({"whole": storage}, memory, step=1, policy="full").stored_bytes
    state = {"whole": storage, "flat": storage.view(-1), "top": storage[:200]}
    two = tensorcask.save(state, memory, step=2, policy="full").stored_bytes
    assert 2.3 * one < two < 2.7 * one
    loaded = tensorcask.load(memory)
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 3


def test_a_tensor_of_one_element_is_stored_with_any_stride(memory, url):
    # PyTorch calls it contiguous, and refuses to view it as bytes.
    state = {"a": torch.arange(6.0)[5::6], "b": torch.arange(6.0).reshape(1, 6)[:, 4::6], "c": torch.ones((), requires_grad=True)}
    assert state["a"].stride() == (6,)
    tensorcask.save(state, memory, step=1, on_unsupported="skip")
    found = tensorcask.load(memory)
    out = {"a": torch.zeros(6)[::6], "b": torch.zeros(1, 6)[:, ::6], "c": torch.zeros(())}
    tensorcask.load(memory, out=out)
    store = tensorcask.Store(url)
    torch.distributed.checkpoint.save({"a": state["a"]}, storage_writer=store.writer(step=1), no_dist=True)
    loaded = {"a": torch.zeros(6)[::6]}
    torch.distributed.checkpoint.load(loaded, storage_reader=store.reader(), no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor) and torch.equal(out[name], tensor), name
    assert loaded["a"].item() == 5


def test_roles_are_stated_by_rules(memory, url):
    state = {"weights": {"w": torch.ones(8).bfloat16()}, "copy": {"w": torch.ones(8)}}
    rules = ["copy.*=master:*", "weights.*=model:*"]
    tensorcask.save(state, memory, step=1, roles=rules)
    store = tensorcask.Store(url)
    torch.distributed.checkpoint.save(state, storage_writer=store.writer(step=1, roles=rules), no_dist=True)
    for snapshot in (tensorcask.Store(memory).snapshot(), store.snapshot()):
        assert {name: (found.role, found.param) for name, found in snapshot.tensors().items()} == {
            "weights.w": ("model", "w"),
            "copy.w": ("master", "w"),
        }
    with pytest.raises(tensorcask.InvalidArgumentError, match="GLOB=ROLE"):
        tensorcask.save(state, memory, step=2, roles="copy.*")


def test_a_state_that_contains_itself_is_refused(memory):
    state = {}
    state["again"] = state
    with pytest.raises(ValueError, match="contain itself"):
        tensorcask.save(state, memory, step=1)
    deep = value = []
    for _ in range(300):
        value.append([])
        value = value[0]
    tensorcask.save(deep, memory, step=1)
    assert tensorcask.load(memory) == deep


def test_out_is_filled_in_place(memory):
    state = {"model": {"w": torch.randn(64, 32), "n": np.arange(5)}, "step": 3}
    tensorcask.save(state, memory, step=1)
    strided = torch.empty(32, 64).t()
    for w in (torch.empty(64, 32), strided, torch.nn.Parameter(torch.empty(64, 32))):
        out = {"model": {"w": w, "n": np.zeros(5, np.int64)}, "step": None}
        loaded = tensorcask.load(memory, out=out)
        assert loaded["model"]["w"] is w and loaded["step"] == 3 and loaded["model"]["n"] is out["model"]["n"]
        assert torch.equal(w, state["model"]["w"]) and (out["model"]["n"] == np.arange(5)).all()
    for bad, says in [
        (torch.empty(64, 33), "shape"),
        (torch.empty(64, 32, dtype=torch.float64), "float64"),
        (np.empty((64, 32), np.float64), "float64"),
    ]:
        with pytest.raises(ValueError, match=says):
            tensorcask.load(memory, out={"model": {"w": bad}})
    frozen = np.zeros((64, 32), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        tensorcask.load(memory, out={"model": {"w": frozen}})
    with pytest.raises(tensorcask.TemplateError, match="model.absent"):
        tensorcask.load(memory, out={"model": {"absent": torch.empty(1)}})


def test_a_number_of_numpy_is_replaced(memory):
    state = {"loss": np.float32(0.5), "n": np.int64(7), "w": torch.ones(3)}
    tensorcask.save(state, memory, step=1)
    state = {"loss": np.float32(0), "n": np.int64(0), "w": torch.zeros(3)}
    loaded = tensorcask.load(memory, out=state)
    assert (loaded["loss"], loaded["n"]) == (0.5, 7) and isinstance(loaded["loss"], np.float32) and torch.equal(state["w"], torch.ones(3))
    tensorcask.save({"loss": np.float32(0.25), "n": np.int64(7), "w": torch.ones(3)}, memory, step=2)
    assert tensorcask.load(memory, out=loaded, have=1)["loss"] == 0.25
    with pytest.raises(ValueError, match="float64"):
        tensorcask.load(memory, out={"loss": np.float64(0)})


def test_have_reads_only_what_lies_between(memory):
    w = torch.randn(2_000, 500)
    states = []
    for step in range(3):
        w[step * 10] += 1
        states.append(w.clone())
        tensorcask.save({"w": w, "step": step}, memory, step=step, policy="consecutive")
    out = {"w": states[0].clone(), "step": 0}
    store = tensorcask.Store(memory)
    before = store.native().io()[1]
    assert store.load(out=out, have=0)["step"] == 2
    assert torch.equal(out["w"], states[2])
    assert store.native().io()[1] - before < w.nbytes // 4
    with pytest.raises(ValueError, match="`out` is missing"):
        store.load(have=0)


def test_parts_are_selected(memory):
    state = {"model": {"a": torch.arange(24.0).reshape(4, 6), "b": torch.ones(2)}, "opt": {"a": torch.zeros(3)}}
    tensorcask.save(state, memory, step=1)
    assert sorted(tensorcask.load(memory, tensors="model.*")) == ["model.a", "model.b"]
    assert sorted(tensorcask.load(memory, tensors=["*.a"])) == ["model.a", "opt.a"]
    with pytest.raises(tensorcask.TemplateError, match="nothing"):
        tensorcask.load(memory, tensors="nothing*")
    part = tensorcask.load(memory, slices={"model.a": (slice(1, 3), slice(-2, None))})
    assert torch.equal(part["model.a"], state["model"]["a"][1:3, -2:])
    assert tensorcask.load(memory, slices={"model.a": slice(3, 1)})["model.a"].shape == (0, 6)
    for bad in (slice(0, 4, 2), (slice(0, 1),) * 3):
        with pytest.raises(tensorcask.InvalidArgumentError):
            tensorcask.load(memory, slices={"model.a": bad})
    with pytest.raises(tensorcask.TemplateError):
        tensorcask.load(memory, slices={"absent": slice(0, 1)})


def test_frameworks_and_types_are_converted(memory):
    state = {"w": torch.randn(8, dtype=torch.bfloat16), "i": torch.arange(3), "c": torch.complex(torch.ones(2), torch.ones(2))}
    tensorcask.save(state, memory, step=1)
    as_numpy = tensorcask.load(memory, framework="numpy")
    assert as_numpy["w"].dtype == ml_dtypes.bfloat16 and as_numpy["w"].tobytes() == torch_bytes(state["w"])
    raw = tensorcask.load(memory, framework="bytes")["w"]
    assert raw == RawTensor("bf16", (8,), bytearray(torch_bytes(state["w"]))) and byte_count("bf16", (8,)) == 16
    for dtype in (torch.float32, "f32", "float32"):
        wide = tensorcask.load(memory, dtype=dtype)
        assert torch.equal(wide["w"], state["w"].float()) and wide["i"].dtype == torch.int64
        assert torch.equal(wide["c"], state["c"]), "half of a complex number is another number"
    assert tensorcask.load(memory, device="cpu")["w"].device.type == "cpu"
    with pytest.raises(ValueError, match="framework 'tensorflow'"):
        tensorcask.load(memory, framework="tensorflow")
    tensorcask.save({"w": RawTensor("f6_e2m3", (4,), bytearray(3))}, memory, step=2)
    with pytest.raises(tensorcask.UnsupportedError, match="torch has no f6_e2m3"):
        tensorcask.load(memory, framework="torch")


def test_many_threads_save_and_load(url):
    store = tensorcask.Store(url)
    errors = []

    def work(number):
        try:
            for step in range(number * 4, number * 4 + 4):
                store.save({"w": torch.full((1000,), float(step))}, step=step)
                assert store.load(step=step)["w"][0] == step
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors and len(store.snapshots()) == 16 and store.verify().is_clean


def test_weights_in_f32_are_read_as_bf16(tmp_path):
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(300, 700, generator=generator)
    weight[0, :4] = torch.tensor([float("inf"), -0.0, 1 + 2**-9, 1e-40])
    count = torch.arange(5)
    store = tensorcask.Store(tmp_path)
    store.save({"w": weight, "tied": weight, "count": count}, step=1)
    store.save({"w": weight * 1.001, "tied": weight, "count": count}, step=2)
    for step, factor in ((1, 1.0), (2, 1.001)):
        for dtype in (torch.bfloat16, "bf16"):
            state = store.load(step, dtype=dtype)
            assert state["w"].dtype == torch.bfloat16 and state["count"].dtype == torch.int64
            assert torch.equal(state["w"], (weight * factor).to(torch.bfloat16))
            assert torch.equal(state["tied"], weight.to(torch.bfloat16))
    rows = store.load(1, slices={"w": slice(3, 9)}, dtype="bf16", framework="torch")["w"]
    assert torch.equal(rows, weight[3:9].to(torch.bfloat16))


def test_named_rows_need_no_base(tmp_path):
    table = torch.randn(5000, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    store = tensorcask.Store(tmp_path)
    options = {"base_cache": "none", "policy": "one_shot", "objective": "smallest"}
    store.save({"model": {"table": table}}, step=1, changed_rows={"model.table": []}, **options)
    for step, rows in ((2, [3, 4, 4999]), (3, [17])):
        table[rows] += 1
        saved = store.save({"model": {"table": table}}, step=step, changed_rows={"model.table": rows}, **options)
        assert saved.chunks == {"tc.rows": 1} and saved.stored_bytes < 4000
        assert torch.equal(store.load(step)["model"]["table"], table)
    with pytest.raises(tensorcask.NotFoundError, match="no tensor of this name"):
        store.save({"model": {"table": table}}, step=4, changed_rows={"table": [1]}, **options)
    with pytest.raises(tensorcask.InvalidArgumentError, match="5000 rows"):
        store.save({"model": {"table": table}}, step=4, changed_rows={"model.table": [5000]}, **options)


def test_a_tensor_made_of_others_is_stored_as_these(memory):
    from torch.testing._internal.two_tensor import TwoTensor

    def weights(value):
        return {"w": TwoTensor(torch.full((3, 2), value), torch.full((3, 2), 2 * value)), "b": torch.full((2,), value)}

    tensorcask.save(weights(1.5), memory, step=1)
    loaded = tensorcask.load(memory)
    assert torch.equal(loaded["w"]["a"], torch.full((3, 2), 1.5)) and torch.equal(loaded["w"]["b"], torch.full((3, 2), 3.0))
    out = weights(0.0)
    tensorcask.load(memory, out=out)
    assert torch.equal(out["w"].a, torch.full((3, 2), 1.5)) and torch.equal(out["w"].b, torch.full((3, 2), 3.0))
    assert torch.equal(out["b"], torch.full((2,), 1.5))
