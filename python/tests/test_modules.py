"""Modules of the package have an order. Each imports only earlier modules."""

import ast
from pathlib import Path

import tensorcask

PACKAGE = Path(tensorcask.__file__).parent
HEADING = "# Modules, from the ground up; each imports only modules before it:"


def declared_order():
    lines = (PACKAGE / "__init__.py").read_text().splitlines()
    after = lines[lines.index(HEADING) + 1 :]
    listed = after[: next(at for at, line in enumerate(after) if not line.startswith("#"))]
    return [name for line in listed for name in line.removeprefix("#").replace("|", " ").split()]


def imported_by(path):
    """Returns the package modules that a module imports: at its top, in functions, and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            yield from [node.module] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tensorcask":
            yield (node.module.split(".") + [""])[1]
        elif isinstance(node, ast.Import):
            yield from [(alias.name.split(".") + [""])[1] for alias in node.names if alias.name.split(".")[0] == "tensorcask"]


def test_each_module_imports_only_modules_before_it():
    order = declared_order()
    modules = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert sorted(order) == sorted({*modules, "_native"})
    for name, path in modules.items():
        above = [found for found in imported_by(path) if order.index(found) >= order.index(name)]
        assert not above, f"{name} imports {above}"


def test_private_modules_are_short():
    for path in PACKAGE.glob("_*.py"):
        assert len(path.read_text().splitlines()) < 600, path.name
