#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 writes zarr 3 through its API v1, zarr 2 through the older one, and in other folders.
#
# A folder of StandardCheckpointer has manifest.ocdbt at its top, with arrays of zarr 2 (w/.zarray). A folder of v1.save has it in
# state/, with arrays of zarr 3 (w/zarr.json). Both have _CHECKPOINT_METADATA at the top, so this file does not tell which of
# them a reader has before it.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bash "$(dirname "${BASH_SOURCE[0]}")/in_venv" "$scratch" orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 <<'PYTHON'
import pathlib

import jax.numpy as jnp
import orbax.checkpoint as v0
import tensorstore
from orbax.checkpoint.experimental import v1

here = pathlib.Path.cwd()
state = {"w": jnp.arange(8, dtype=jnp.bfloat16)}
with v0.StandardCheckpointer() as checkpointer:
    checkpointer.save(here / "v0", state)
v1.save(here / "v1", state)

found = {}
for name in ("v0", "v1"):
    root = here / name
    [manifest] = [path for path in root.rglob("manifest.ocdbt") if "process" not in str(path)]
    arrays = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{manifest.parent}/"}).result()
    keys = sorted(key.decode() for key in arrays.list().result())
    found[name] = str(manifest.parent.relative_to(root)), keys
    print(f"{name}: in folder {found[name][0]!r}: {keys}; _CHECKPOINT_METADATA at the top: {(root / '_CHECKPOINT_METADATA').exists()}")
    assert (root / "_CHECKPOINT_METADATA").exists()
assert found == {"v0": (".", ["w/.zarray", "w/0"]), "v1": ("state", ["w/c/0", "w/zarr.json"])}
PYTHON
