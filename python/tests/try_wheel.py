"""Tries an installed wheel with the standard library alone: import, save, load, the command.

    python try_wheel.py [COMMAND]            # without the path of a command, the command runs in this process
    python try_wheel.py --metadata WHEEL     # checks the files and the metadata of a wheel
"""

import contextlib
import importlib.metadata
import io
import struct
import subprocess
import sys
import tempfile
import zipfile


def check_metadata(path):
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [metadata] = [wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
        [scripts] = [wheel.read(name).decode() for name in names if name.endswith(".dist-info/entry_points.txt")]
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert not needed, f"the wheel depends on {needed}"
    assert "tensorcask=" in scripts.replace(" ", ""), scripts
    for file in ("tensorcask/_native.abi3.so", "tensorcask/py.typed", "tensorcask/_native.pyi"):
        assert file in names, f"the wheel has no {file}"
    for ending in ("man1/tensorcask.1", "completions/tensorcask", "_tensorcask", "tensorcask.fish"):
        assert any(name.endswith(ending) for name in names), f"the wheel has no file *{ending}"


def run(command, *words):
    if command is not None:
        return subprocess.run([command, *words], capture_output=True, text=True, check=True).stdout
    from tensorcask.__main__ import main

    printed = io.StringIO()
    before = sys.argv
    sys.argv = ["tensorcask", *words]
    try:
        with contextlib.redirect_stdout(printed):
            main()
    except SystemExit as ended:
        assert not ended.code, ended.code
    finally:
        sys.argv = before
    return printed.getvalue()


def try_package(command):
    import tensorcask

    def tensor(value):
        return tensorcask.RawTensor("f32", (4096,), bytearray(struct.pack("<f", value) * 4096))

    with tempfile.TemporaryDirectory() as folder:
        store = tensorcask.Store(f"{folder}/store")
        for step in (1, 2):
            store.save({"model": {"w": tensor(step / 3), "b": tensor(0.5)}, "step": step}, step=step, policy="consecutive")
        for step in (1, 2):
            loaded = store.load(step)
            assert loaded["step"] == step and bytes(loaded["model"]["w"].data) == bytes(tensor(step / 3).data)
        assert [info.kind for info in store.snapshots()] == ["base", "delta"] and store.verify().is_clean
        run(command, "verify", store.url)
        listed = run(command, "ls", store.url)
        # In this process, the command writes to the file descriptor itself.
        assert command is None or "delta" in listed, listed
    installed = sorted({distribution.metadata["Name"] for distribution in importlib.metadata.distributions()} - {"pip", "setuptools"})
    assert command is None or installed == ["tensorcask"], installed
    print(f"tensorcask {tensorcask.__version__} works with Python {sys.version.split()[0]}: import, save, load, command")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--metadata"]:
        check_metadata(sys.argv[2])
    else:
        try_package(sys.argv[1] if len(sys.argv) > 1 else None)
