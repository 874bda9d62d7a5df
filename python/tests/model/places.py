"""Places for a store, and the things that people do to a store there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from random import Random

KINDS = ("store.json", "casks", "directories", "snapshots", "log", "catalog")


class Place(ABC):
    """Objects of a store by name, past the library."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def beside(self, name: str) -> str:
        """URL of another store, which goes when the place is closed."""

    @abstractmethod
    def names(self, kind: str = "") -> list[str]:
        """All objects, or those of one kind, in the order of names."""

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    @abstractmethod
    def write(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def unlink(self, name: str) -> None: ...

    def objects(self) -> dict[str, bytes]:
        return {name: self.read(name) for name in self.names()}

    def fill(self, objects: Mapping[str, bytes]) -> None:
        for name, data in objects.items():
            self.write(name, data)

    def remove(self, kind: str, random: Random) -> bool:
        """Removes one object of a kind. Returns false if there is none."""
        found = self.names(kind)
        if found:
            self.unlink(random.choice(found))
        return bool(found)

    def remove_all(self, kind: str) -> bool:
        found = self.names(kind)
        for name in found:
            self.unlink(name)
        return bool(found)


class Folder(Place):
    """A folder on local disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "run"
        self._stashed = 0

    @property
    def url(self) -> str:
        return str(self.path)

    def beside(self, name: str) -> str:
        return str(self.root / name)

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def copy(self) -> Path:
        """A backup."""
        self._stashed += 1
        backup = self.root / f"copy-{self._stashed}"
        if self.path.is_dir():
            shutil.copytree(self.path, backup)
        else:
            backup.mkdir()
        return backup

    def move_away(self) -> Path:
        self._stashed += 1
        away = self.root / f"away-{self._stashed}"
        if self.path.is_dir():
            os.rename(self.path, away)
        else:
            away.mkdir()
        return away

    def put_back(self, kept: Path) -> None:
        """Replaces the content by a kept copy. An agent that saves meanwhile may create folders of its own."""
        self.delete()
        shutil.copytree(kept, self.path, dirs_exist_ok=True)

    def names(self, kind: str = "") -> list[str]:
        if kind == "store.json":
            return [name for name in [kind] if (self.path / name).exists()]
        return sorted(str(path.relative_to(self.path)) for path in (self.path / kind).rglob("*") if path.is_file())

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file: a linked one may have a second name.
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    def unlink(self, name: str) -> None:
        """Removes a file, and its folder if that is empty now."""
        path = self.path / name
        path.unlink()
        if path.parent != self.path:
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class Mounted(Folder):
    """A folder that is mounted and unmounted; below it lies an empty one. Where mounting is not permitted, folders are exchanged."""

    def __init__(self, root: Path, can_mount: bool) -> None:
        super().__init__(root)
        self._can_mount = can_mount
        self._volume = root / "volume"
        self._below = root / "below"
        self._volume.mkdir()
        if can_mount:
            self.path.mkdir()
        self._mounted = False
        self.exchange()

    def _is_mounted(self) -> bool:
        # os.path.ismount does not see a folder that is mounted from the same file system.
        return f" {self.path} " in Path("/proc/self/mountinfo").read_text() if self._can_mount else self._mounted

    def exchange(self) -> None:
        """Mounts the folder, or unmounts it if it is mounted."""
        if self._can_mount:
            command = ["umount", str(self.path)] if self._is_mounted() else ["mount", "--bind", str(self._volume), str(self.path)]
            subprocess.run(command, check=True)
        elif self._mounted:
            os.rename(self.path, self._volume)
            os.rename(self._below, self.path)
        else:
            if self.path.is_dir():
                os.rename(self.path, self._below)
            else:
                self._below.mkdir()
            os.rename(self._volume, self.path)
        self._mounted = not self._mounted

    def delete(self) -> None:
        # The folder itself is in use, as a mount point is.
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def put_back(self, kept: Path) -> None:
        self.delete()
        shutil.copytree(kept, self.path, dirs_exist_ok=True)

    def move_away(self) -> Path:
        away = self.copy()
        self.delete()
        return away

    def close(self) -> None:
        # A sequence runs in a child of the process that closes its place.
        if self._can_mount and self._is_mounted():
            self.exchange()
        super().close()


def can_mount(scratch: Path) -> bool:
    """Whether this process may mount folders."""
    here, there = scratch / "mount-here", scratch / "mount-there"
    here.mkdir()
    there.mkdir()
    tried = subprocess.run(["mount", "--bind", str(here), str(there)], capture_output=True, check=False)
    if tried.returncode == 0:
        subprocess.run(["umount", str(there)], check=True)
    return tried.returncode == 0


class Prefix(Place):
    """A prefix of a bucket."""

    def __init__(self, url: str, name: str) -> None:
        import boto3
        from botocore.config import Config

        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._root = f"{prefix.rstrip('/')}/{name}".lstrip("/")
        self._s3 = boto3.client(
            "s3",
            endpoint_url=os.environ.get("AWS_ENDPOINT"),
            region_name=os.environ.get("AWS_REGION", "us-east-1"),
            config=Config(s3={"addressing_style": "path"}),
        )
        self._stashed = 0
        self._read: dict[tuple[str, str], bytes] = {}

    @property
    def url(self) -> str:
        return self.beside("run")

    def beside(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._root}/{name}"

    def _keys(self, folder: str) -> dict[str, str]:
        """Keys with their ETags."""
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=f"{self._root}/{folder}")
        return {found["Key"]: found["ETag"] for page in pages for found in page.get("Contents", [])}

    def _copy(self, source: str, target: str) -> None:
        for key in self._keys(f"{source}/"):
            name = key.removeprefix(f"{self._root}/{source}/")
            origin = {"Bucket": self._bucket, "Key": key}
            self._s3.copy_object(Bucket=self._bucket, Key=f"{self._root}/{target}/{name}", CopySource=origin)

    def delete(self) -> None:
        for key in self._keys("run/"):
            self._s3.delete_object(Bucket=self._bucket, Key=key)

    def copy(self) -> str:
        self._stashed += 1
        self._copy("run", f"copy-{self._stashed}")
        return f"copy-{self._stashed}"

    def move_away(self) -> str:
        away = self.copy()
        self.delete()
        return away

    def put_back(self, kept: str) -> None:
        self.delete()
        self._copy(kept, "run")

    def names(self, kind: str = "") -> list[str]:
        return sorted(key.removeprefix(f"{self._root}/run/") for key in self._keys(f"run/{kind}"))

    def objects(self) -> dict[str, bytes]:
        found = {}
        for key, tag in sorted(self._keys("run/").items()):
            name = key.removeprefix(f"{self._root}/run/")
            if (name, tag) not in self._read:
                self._read[name, tag] = self.read(name)
            found[name] = self._read[name, tag]
        return found

    def read(self, name: str) -> bytes:
        return self._s3.get_object(Bucket=self._bucket, Key=f"{self._root}/run/{name}")["Body"].read()

    def write(self, name: str, data: bytes) -> None:
        self._s3.put_object(Bucket=self._bucket, Key=f"{self._root}/run/{name}", Body=data)

    def unlink(self, name: str) -> None:
        self._s3.delete_object(Bucket=self._bucket, Key=f"{self._root}/run/{name}")

    def close(self) -> None:
        for key in self._keys(""):
            self._s3.delete_object(Bucket=self._bucket, Key=key)
