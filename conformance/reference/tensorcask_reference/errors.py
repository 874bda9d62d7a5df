"""Rejections (README 1.12) and limits (limits 1)."""

from dataclasses import dataclass


class Reject(Exception):
    """What is read breaks a clause of the spec."""

    def __init__(self, kind: str, clause: str, what: str) -> None:
        super().__init__(f"{kind}: {what} ({clause})")
        self.kind, self.clause, self.what = kind, clause, what


def corrupt(clause: str, what: str) -> Reject:
    return Reject("corrupt", clause, what)


def unsupported(clause: str, what: str) -> Reject:
    return Reject("unsupported", clause, what)


def limit(what: str) -> Reject:
    return Reject("limit", "limits 2", what)


@dataclass(frozen=True)
class Limits:
    """The defaults of limits 1."""

    max_dimensions: int = 64
    max_name_bytes: int = 4096
    max_tensors: int = 16777216
    max_shards: int = 67108864
    max_blobs: int = 1048576
    max_index_bytes: int = 1073741824
    max_blob_bytes: int = 4294967296
    max_read_bytes: int = 137438953472
    max_directory_bytes: int = 1073741824
    max_manifest_bytes: int = 67108864
    max_entry_bytes: int = 1048576
    max_catalog_bytes: int = 1073741824
    max_chain_depth: int = 1024

    def check(self, name: str, value: int) -> None:
        if value > getattr(self, name):
            raise limit(f"{value} is over {name}")


LIMITS = Limits()


def check_version(major: int, what: str) -> None:
    """README 3: minor versions only add what features announce."""
    if major != 1:
        raise unsupported("README 3", f"{what} of major version {major}")


def check_features(features: list[int] | list[str], what: str) -> None:
    """README 4: version 1.0 has no features, so every must-understand feature is unknown."""
    if features:
        raise unsupported("README 4", f"{what} needs features {features}")
