"""Executes the notebooks, and writes them as pages of the book.

    python docs/notebooks/build.py

Needs `pip install './python[test]'`. The notebooks here have no outputs; the pages in docs/src/guides have. The test
python/tests/test_notebooks.py executes the notebooks again, and fails if a page is not what comes out.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbconvert
import nbformat
from jupyter_client import AsyncKernelManager

ROOT = Path(__file__).resolve().parents[2]
PAGES = {ROOT / "docs" / "notebooks" / "find_a_nan.ipynb": ROOT / "docs" / "src" / "guides" / "notebook.md"}


def page_of(notebook: Path, folder: Path) -> str:
    """Executes a notebook in a folder and returns it as Markdown. Raises the error of a cell that fails."""
    # Jupyter keeps these files in the home folder otherwise.
    os.environ["IPYTHONDIR"] = os.environ["JUPYTER_RUNTIME_DIR"] = str(folder / ".jupyter")
    # Sockets in that folder instead of ports that other users of this machine can open.
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(folder / ".kernel"))
    executed = nbclient.NotebookClient(nbformat.read(notebook, 4), km=kernel, timeout=600, coalesce_streams=True).execute(cwd=str(folder))
    text, resources = nbconvert.MarkdownExporter().from_notebook_node(executed)
    if resources["outputs"]:
        raise ValueError(f"{notebook}: outputs that are files are not supported: {list(resources['outputs'])}")
    lines = [line.rstrip() for line in text.splitlines()]
    kept = [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]
    return "\n".join(kept).strip() + "\n"


def main() -> int:
    for notebook, page in PAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(page_of(notebook, Path(folder)))
        print(page.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
