"""Arguments: signatures, and errors for wrong arguments."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import tensorcask
import tensorcask.torch
import torch
from tensorcask import InvalidArgumentError

SAVE = {
    "policy",
    "user",
    "metadata",
    "on_unsupported",
    "base_cache",
    "verify_after_encode",
    "objective",
    "codecs",
    "roles",
    "precision",
    "gradients",
    "statistics",
    "changed_rows",
    "overwrite",
    "check",
    "frozen",
    "keep_last",
    "keep_every",
    "keep_weights_every",
    "free",
    "progress",
}
LOAD = {
    "tensors",
    "slices",
    "out",
    "device",
    "map_location",
    "strip_prefix",
    "framework",
    "strict",
    "dtype",
    "have",
    "max_error",
    "mmap",
    "progress",
}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (tensorcask.save, {"state", "url", "step", "config"} | SAVE),
        (tensorcask.Store.save, {"self", "state", "step"} | SAVE),
        (tensorcask.load, {"url", "step", "config"} | LOAD),
        (tensorcask.Store.load, {"self", "step"} | LOAD),
        (tensorcask.Snapshot.load, {"self"} | LOAD - {"strict", "progress"}),
    ],
)
def test_signatures_name_every_option(function, names):
    parameters = inspect.signature(function).parameters
    assert set(parameters) == names
    assert all(parameter.annotation is not inspect.Parameter.empty for name, parameter in parameters.items() if name != "self")


@pytest.mark.parametrize(
    ("method", "made"),
    [(tensorcask.Store.writer, tensorcask.torch.Writer), (tensorcask.Store.reader, tensorcask.torch.Reader)],
)
def test_writer_and_reader_take_what_they_make_takes(method, made):
    def options(function):
        parameters = inspect.signature(function).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}

    assert options(method) == options(made.__init__) and options(method)


def test_every_option_of_the_engine_has_a_type_and_is_described():
    parameters = inspect.signature(tensorcask.Engine.__init__).parameters
    described = inspect.cleandoc(tensorcask.Engine.__doc__)
    for name, parameter in parameters.items():
        if name not in ("self", "config", "fsync", "copy_threads"):
            assert parameter.annotation is not inspect.Parameter.empty and f"``{name}" in described, name
    for field in tensorcask.Peers.__dataclass_fields__:
        assert f"``{field}``" in inspect.cleandoc(tensorcask.Peers.__doc__), field


def test_every_option_of_load_and_save_is_described():
    for function, names in ((tensorcask.load, LOAD), (tensorcask.Store.save, SAVE)):
        for name in names:
            assert f"\n    {name}: " in inspect.cleandoc(function.__doc__), (function, name)


def test_a_misspelt_option_fails_a_type_check(tmp_path):
    """`mypy --strict` knows the options, their types and their allowed words."""
    checked = tmp_path / "checked.py"
    checked.write_text(
        """\
import tensorcask

store = tensorcask.Store("memory://typed")
saved: tensorcask.Saved = tensorcask.save({}, "memory://typed", step=1, policy="intermittent:8", base_cache="none")
tensorcask.save({}, "memory://typed", step=1, polcy="full")
store.save({}, step=1, polcy="full")
store.writer(polcy="full")
store.reader(stp=1)
tensorcask.load("memory://typed", framework="tensorflow")
tensorcask.load("memory://typed", step="newest")
tensorcask.load("memory://typed", step="latest", framework="numpy", dtype={"model": "bf16"}, slices={"w": slice(0, 1)})
store.verify("everything")
store.save({}, step=1, on_unsupported="ignore")
tensorcask.Engine("memory://typed", peers=tensorcask.Peers("auto", tls="/tls", replicas=2))
tensorcask.Engine("memory://typed", peers=["a:1", "b:1"])
tensorcask.Engine("memory://typed", peers=tensorcask.Peers("auto", copies=2))
tensorcask.Engine("memory://typed", peers=7411)
"""
    )
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\nignore_missing_imports = True\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path / "cache"), str(checked)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = sorted({int(line.split(":")[1]) for line in run.stdout.splitlines() if "error:" in line})
    assert lines == [5, 6, 7, 8, 9, 10, 12, 13, 16, 17], run.stdout + run.stderr


W = torch.ones(4, 4)


def save(**options):
    return lambda url: tensorcask.save({"w": W}, url, **{"step": 2, **options})


def load(*arguments, **options):
    return lambda url: tensorcask.load(url, *arguments, **options)


@pytest.mark.parametrize(
    ("call", "builtin", "says"),
    [
        (load(slices={"w": (0, 1)}), TypeError, r"slices\['w'\]: \(0, 1\).*slice\(0, 2\)"),
        (load(slices={"w": [slice(0, 1)]}), TypeError, r"slices\['w'\]"),
        (load(slices={"w": slice("a", None)}), TypeError, r"slices\['w'\]"),
        (load(slices=["w"]), TypeError, "slices: "),
        (load(tensors=3), TypeError, "tensors: 3"),
        (load(tensors=[3]), TypeError, "tensors: 3"),
        (load(dtype="foo"), ValueError, "dtype 'foo'.*bf16"),
        (load(dtype=torch.int32), ValueError, "dtype torch.int32.*floating-point"),
        (load(dtype=object()), ValueError, "dtype <object.*bf16"),
        (load(dtype={"model": "foo"}), ValueError, r"dtype\['model'\] 'foo'.*bf16"),
        (load(framework="tensorflow"), ValueError, "framework 'tensorflow'.*'torch'"),
        (load(device="gpu"), ValueError, "device 'gpu'"),
        (load(device=1.5), ValueError, "device 1.5"),
        (load(framework="numpy", device="cpu"), ValueError, "device 'cpu': numpy arrays"),
        (load(max_error="a"), ValueError, "max_error 'a'"),
        (load(max_error=-1), ValueError, "max_error -1"),
        (load(progress=3), TypeError, "progress: 3"),
        (load("2"), TypeError, "step '2': use an integer or 'latest'"),
        (load(config={"a": 1}), TypeError, r"config\['a'\]: 1"),
        (load(have=1), ValueError, "have=.*`out` is missing"),
        (save(policy="intermittent:x"), ValueError, "policy 'intermittent:x'.*adaptive.*intermittent:N"),
        (save(policy="intermittent:-1"), ValueError, "policy 'intermittent:-1'"),
        (save(policy="intermittent:"), ValueError, "policy 'intermittent:'"),
        (save(policy=3), TypeError, "policy 3"),
        (save(base_cache="attic"), ValueError, "base_cache 'attic'.*disk:FOLDER"),
        (save(base_cache=None), ValueError, "base_cache None"),
        (save(objective=1), TypeError, "objective 1.*balanced"),
        (save(precision=16), TypeError, "precision: 16"),
        (save(precision=[16]), TypeError, "precision: 16"),
        (save(frozen=3), TypeError, "frozen: 3"),
        (save(codecs=3), TypeError, "codecs: 3.*model=tc.bitmask"),
        (save(roles=3), TypeError, "roles: 3.*app.ema"),
        (save(check="all"), ValueError, "check 'all'.*'finite', 'tag'"),
        (save(metadata={"a": 1}), TypeError, r"metadata\['a'\]: 1"),
        (save(user=[1]), TypeError, r"user: \[1\]"),
        (save(user={"a": {"b": object()}}), TypeError, r"user\['a'\]\['b'\]: <object"),
        (save(changed_rows={"w": "a"}), TypeError, r"changed_rows\['w'\]"),
        (save(changed_rows={"w": [-1]}), ValueError, r"changed_rows\['w'\]: row -1"),
        (save(on_unsupported="ignore"), ValueError, "on_unsupported='ignore'"),
        (save(step=-1), ValueError, "step -1"),
        (save(step=2**64), ValueError, "step 18446744073709551616"),
        (save(step=1.5), TypeError, "step 1.5"),
        (save(step=np.array(1.5)), TypeError, r"step array\(1.5\)"),
        (save(step=torch.tensor(1.5)), TypeError, r"step tensor\(1.5"),
        (save(changed_rows={"w": [0.5]}), TypeError, r"changed_rows\['w'\]"),
        (save(step="x"), TypeError, "step 'x': use an integer$"),
        (save(progress="yes"), TypeError, "progress: 'yes'"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_accepted(call, builtin, says, memory):
    tensorcask.save({"w": W}, memory, step=1)
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        call(memory)
    assert isinstance(caught.value, builtin)
    assert (caught.value.kind, caught.value.message) == ("invalid_argument", str(caught.value))
    assert caught.value.object is None and caught.value.clause is None


def test_what_means_the_same_is_accepted(memory):
    tensorcask.save({"w": W, "v": W}, memory, step=np.int64(1), changed_rows={"w": np.array([0])}, user={"loss": torch.tensor(0.5)})
    tensorcask.save({"w": W, "v": W}, memory, step=torch.tensor(2))
    assert tensorcask.load(memory, step=np.int64(1), tensors={"w": 1}.keys())["w"].shape == (4, 4)
    assert tensorcask.load(memory, device=torch.device("cpu"), tensors=("w", "v")).keys() == {"w", "v"}
    assert tensorcask.Store(memory).snapshot(1).user["loss"] == 0.5


def test_swapped_arguments_are_told(memory):
    for call in (
        lambda: tensorcask.save(memory, {"w": W}, step=1),
        lambda: tensorcask.Store({"w": W}),
        lambda: tensorcask.load(1, memory),
        lambda: tensorcask.load({"w": W}),
    ):
        with pytest.raises(InvalidArgumentError, match="url: .*path, a URL or a Store") as caught:
            call()
        assert isinstance(caught.value, TypeError)
    with pytest.raises(InvalidArgumentError, match=r"save\(state, url"):
        tensorcask.save(memory, {"w": W}, step=1)
    with pytest.raises(InvalidArgumentError, match=r"load\(url, step"):
        tensorcask.load(1, memory)
    with pytest.raises(InvalidArgumentError, match=f"step '{memory}': use an integer or 'latest'"):
        tensorcask.load("latest", memory)


def uninitialized():
    return torch.nn.LazyLinear(3).weight


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def traced(transform):
    """A tensor as seen by a function under a torch transform."""
    seen = []

    def function(x):
        seen.append(x)
        return x.sum()

    transform(function)(torch.ones(3, 2))
    return seen[0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor.*unbind"),
        (fake, "fake tensor"),
        (uninitialized, "uninitialized"),
        (lambda: torch._to_functional_tensor(torch.ones(3)), "functional tensor"),
        (lambda: traced(torch.func.vmap), "torch.func"),
        (lambda: torch._efficientzerotensor((3,)), "cannot be read"),
        (lambda: torch.empty(3, device="meta"), "meta tensor"),
    ],
)
def test_a_tensor_without_memory_is_named(value, says, memory):
    state = {"fine": torch.ones(2), "outer": [0, {"bad": value()}]}
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        tensorcask.save(state, memory, step=1)
    assert isinstance(caught.value, TypeError) and str(caught.value).startswith("state['outer'][1]['bad']: ")
    tensorcask.save(state, memory, step=1, on_unsupported="skip")
    assert tensorcask.load(memory)["outer"] == [0, {}]


def test_a_save_while_tensors_are_fake_is_refused(memory):
    from torch._subclasses.fake_tensor import FakeTensorMode

    state = {"w": W}
    with FakeTensorMode(), pytest.raises(InvalidArgumentError, match=r"state\['w'\]"):
        tensorcask.save(state, memory, step=1)


def test_an_array_that_jax_deleted_is_named(memory):
    import jax

    gone = jax.numpy.ones(3)
    gone.delete()
    with pytest.raises(InvalidArgumentError, match=r"state\['w'\]: .*deleted"):
        tensorcask.save({"w": gone}, memory, step=1)

    def save(x):
        with pytest.raises(InvalidArgumentError, match=r"state\['w'\]: .*jit"):
            tensorcask.save({"w": x}, memory, step=1)
        return x

    jax.jit(save)(np.ones(3))


def test_a_value_that_cannot_be_stored_has_an_error_of_its_own(url):
    with pytest.raises(tensorcask.InvalidArgumentError, match="lock") as raised:
        tensorcask.save({"lock": object()}, url, step=1)
    assert type(raised.value).__name__ == "UnstorableTypeError" and isinstance(raised.value, TypeError)


def test_errors_of_python_code_have_the_attributes_of_all_errors(tmp_path):
    url = str(tmp_path / "run")
    tensorcask.save({"w": np.zeros((4, 4), np.float32), "n": 1}, url, step=1)
    for call, kind in [
        (lambda: tensorcask.load(url, tensors="nope*"), "template"),
        (lambda: tensorcask.load(url, slices={"w": slice(0, 4, 2)}), "invalid_argument"),
        (lambda: tensorcask.load(url, step=9), "not_found"),
        (lambda: tensorcask.load(url, step=-1), "invalid_argument"),
    ]:
        with pytest.raises(tensorcask.Error) as caught:
            call()
        assert caught.value.kind == kind
        assert caught.value.message and caught.value.message in str(caught.value)
        for name in ("object", "tensor", "chunk", "offset", "clause"):
            getattr(caught.value, name)
    assert issubclass(tensorcask.InvalidValueError, ValueError)
    assert issubclass(tensorcask.UnstorableTypeError, TypeError)
