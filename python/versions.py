"""Writes the versions of the installed packages into the table of tested versions. Run it after the tests have passed:

    .cache/venv-python/bin/python python/versions.py NAME       # such as: newest

The page docs/src/guides/frameworks.md has one table, with a column for each NAME and version of Python. Another run replaces its own
column only.
"""

import datetime
import importlib.metadata
import platform
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/src/guides/frameworks.md"
BEGIN, END = "<!-- versions: written by python/versions.py -->", "<!-- /versions -->"
MISSING = "-"
# Packages that no extra names: they are passed to tensorcask, or a module works with any of their versions.
OTHERS = ("blake3", "obstore", "ray", "torchao")


def bounds():
    """The versions that the extras of the package allow, by package. The first extra that names a package is about it."""
    extras = tomllib.loads((ROOT / "python/pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = {}
    for requirement in [text for name, texts in extras.items() if name != "test" for text in texts]:
        package, bound = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?(.*)", requirement).groups()
        found.setdefault(package, bound)
    return dict(sorted((dict.fromkeys(OTHERS, "") | found).items()))


def installed(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def columns_of(table):
    """The columns of tested versions in a table: packages and versions, by heading."""
    rows = [[cell.strip(" `") for cell in line.strip("| ").split(" | ")] for line in table.strip().splitlines() if line.startswith("|")]
    if not rows:
        return {}
    return {heading: {row[0]: row[at] for row in rows[2:]} for at, heading in enumerate(rows[0]) if at > 1}


def table_of(columns):
    lines = [f"| package | allowed | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for package, bound in bounds().items():
        versions = [column.get(package, MISSING) for column in columns.values()]
        if set(versions) != {MISSING}:
            lines.append(f"| {package} | {f'`{bound}`' if bound else 'any'} | {' | '.join(versions)} |")
    return "\n".join(lines)


def page_with(page, name, python, date, versions):
    """The page with a column of versions, which replaces the column of the same name and version of Python."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    minor = ".".join(python.split(".")[:2])
    columns = columns_of(table)
    kept = {heading: column for heading, column in columns.items() if not re.match(rf"{re.escape(name)}, Python {re.escape(minor)}\.", heading)}
    kept[f"{name}, Python {python}, {date}"] = versions
    return f"{before}{BEGIN}\n\n{table_of(dict(sorted(kept.items())))}\n\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    versions = {package: installed(package) for package in bounds()}
    PAGE.write_text(page_with(PAGE.read_text(), sys.argv[1], platform.python_version(), datetime.date.today().isoformat(), versions))
