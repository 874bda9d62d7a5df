"""Prints the Python packages whose newest version the project does not use: an extra forbids it, or a script pins an older one.

Findings are left out: each is about one version. Asks the package index through pip.
"""

import json
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"([A-Za-z][\w.-]*)(?:\[[\w,]+\])?==(\d+(?:\.\w+)*)")
# Text, in which a version is history.
PROSE = ("CHANGELOG.md", "docs/", "findings/")


def newest(package):
    """The newest version for this Python; None if the index does not answer or has none."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "--json", "--disable-pip-version-check", package]
    ended = subprocess.run(asked, capture_output=True, text=True)
    return json.loads(ended.stdout)["latest"] if ended.returncode == 0 else None


def extras():
    """The requirements of the extras, by text."""
    project = tomllib.loads((ROOT / "python/pyproject.toml").read_text())["project"]
    texts = {text for texts in project["optional-dependencies"].values() for text in texts if not text.startswith("tensorcask[")}
    return {f"python/pyproject.toml, {text}": Requirement(text) for text in sorted(texts)}


def pins():
    """The versions that files of the repository pin, by file and text."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = {}
    for name in files:
        if name.startswith(PROSE) or (ROOT / name).is_symlink():
            continue
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        found |= {f"{name}, {pin[0]}": Requirement(pin[0]) for pin in PIN.finditer(text)}
    return found


used = extras() | pins()
names = sorted({requirement.name for requirement in used.values()})
with ThreadPoolExecutor(4) as pool:
    versions = dict(zip(names, pool.map(newest, names), strict=True))
behind = 0
for place, requirement in used.items():
    version = versions[requirement.name]
    if version is None:
        print(f"{place}: the index has no version for Python {sys.version_info[0]}.{sys.version_info[1]}")
    elif Version(version) not in requirement.specifier:
        print(f"{place}: {version} is newer")
    else:
        continue
    behind += 1
print(f"{behind} of {len(used)} requirements are behind")
