"""A whole store: log, catalogs, snapshots."""

from copy import deepcopy
from pathlib import Path
from typing import Any

from .catalog import check_catalog, find_catalogs
from .chain import Snapshot, Snapshots, read_step, tensor_bytes
from .errors import corrupt
from .log import State, apply_entry, entry_path, last_listed, read_store_file


def is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


class Store:
    """Reads the log and all that it names, and checks it."""

    def __init__(self, root: Path) -> None:
        read_store_file(root)
        self.state = State()
        last = last_listed(root)
        catalogs = find_catalogs(root)
        states: dict[int, State] = {}
        while entry_path(root, self.state.sequence + 1).exists():
            apply_entry(root, self.state)
            if self.state.sequence in catalogs:
                states[self.state.sequence] = deepcopy(self.state)
        if self.state.sequence < last:
            raise corrupt("log 3.1", f"entry {self.state.sequence + 1} is missing, and entry {last} is there")
        if not self.state.sequence and any(is_filled(root / folder) for folder in ("catalog", "directories", "snapshots")):
            raise corrupt("log 4.8", "entry 1 is missing, and objects that follow it are there")
        self.snapshots = Snapshots(root)
        for record in self.state.snapshots.values():
            if record.status != "collected":
                self.snapshots.open(record)
        for sequence, paths in catalogs.items():
            for path in paths:
                check_catalog(path, states.get(sequence), self.snapshots)

    def at(self, step: int) -> Snapshot:
        return self.snapshots.by_id[self.state.live()[step].id]

    def tensor(self, step: int, name: str) -> bytes:
        """All bytes of a tensor."""
        snapshot = self.at(step)
        row = snapshot.directory.layout.by_name[name.encode()]
        return b"".join(piece.tobytes() for piece in tensor_bytes(snapshot, row))

    def read(self) -> dict[str, Any]:
        """What an adapter has to say."""
        latest = self.state.latest()
        live = sorted(self.state.live())
        return {"latest": latest and latest.step, "steps": {str(step): read_step(self.at(step)) for step in live}}
