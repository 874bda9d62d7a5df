"""Reads the bytes of a whole store: which steps it holds, and which objects each step needs. Past the library, by the pages of ``spec/``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Snapshot:
    step: int
    parent: str | None
    # The object that holds the manifest, and where in it the manifest begins: a small snapshot lies in its log entry.
    manifest: str
    begins: int = 0
    status: str = "live"
    pinned: bool = False


class Truth:
    """State of the log after the entries that follow one another from number 1."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = objects
        self.snapshots: dict[str, Snapshot] = {}
        self.entries: list[str] = []
        self._live: dict[int, str] = {}
        while (name := f"log/{len(self.entries) + 1:020}.json") in objects:
            self.entries.append(name)
            self._apply(name)
        self.catalogs = [name for name in objects if name.startswith("catalog/")]

    def _apply(self, name: str) -> None:
        entry, begins = sealed(self.objects[name])
        event = entry["event"]
        if event["kind"] == "added":
            inline = event.get("inline") is not None
            manifest = name if inline else f"snapshots/{event['step']}-{event['snapshot']}.json"
            found = Snapshot(event["step"], event["parent"], manifest, begins if inline else 0)
            earlier = self._live.pop(found.step, None)
            if earlier is not None:
                self.snapshots[earlier].status = "superseded"
            self.snapshots[event["snapshot"]] = found
            self._live[found.step] = event["snapshot"]
        elif event["kind"] == "compacted":
            found = self.snapshots[event["snapshot"]]
            found.parent, found.begins = event["parent"], 0
            found.manifest = f"snapshots/{found.step}-{event['snapshot']}-{event['manifest']}.json"
        elif event["kind"] == "pinned":
            self.snapshots[event["snapshot"]].pinned = event["pinned"]
        elif event["kind"] in ("forgotten", "collecting"):
            for id in event["snapshots"]:
                found = self.snapshots[id]
                self._live.pop(found.step, None) if self._live.get(found.step) == id else None
                if found.status != "collected":
                    found.status = "forgotten" if event["kind"] == "forgotten" else "collected"

    @property
    def steps(self) -> list[int]:
        """Live steps in the order of their commits."""
        return list(self._live)

    @property
    def unpinned(self) -> list[int]:
        return [step for step, id in self._live.items() if not self.snapshots[id].pinned]

    def needs(self, step: int) -> set[str]:
        """Objects that the chain of a step consists of."""
        found: set[str] = set()
        id: str | None = self._live[step]
        while id is not None:
            snapshot = self.snapshots[id]
            manifest, _ = sealed(self.objects[snapshot.manifest][snapshot.begins :])
            found |= {snapshot.manifest, f"directories/{manifest['directory']}"}
            if not snapshot.begins:
                found |= {f"casks/{cask['id']}.cask" for cask in manifest["casks"]}
            id = snapshot.parent
        return found

    @property
    def entry_of_catalog(self) -> str:
        """The entry of the newest catalog. Without a catalog, a name below those of all entries."""
        return max((f"log/{name.split('/')[1].split('-')[0]}.json" for name in self.catalogs), default="")


def sealed(data: bytes) -> tuple[dict[str, Any], int]:
    """Returns a sealed JSON object, and where its seal ends."""
    body, seal, _ = data.partition(b"\nsha256:")
    return json.loads(body), len(body) + len(seal) + 65
