"""`python3 -m tensorcask_reference read PATH`: the adapter of conformance/README.md."""

import json
import sys
from pathlib import Path
from typing import Any

from .cask import Cask
from .errors import Reject, limit
from .store import Store


def read(path: Path) -> dict[str, Any]:
    try:
        return Store(path).read() if path.is_dir() else Cask(path).verify()
    except MemoryError:
        raise limit("no memory for it") from None


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "read":
        print("usage: python3 -m tensorcask_reference read PATH", file=sys.stderr)
        return 2
    try:
        status, value = 0, read(Path(arguments[1]))
    except Reject as reject:
        status, value = 1, {"kind": reject.kind, "clause": reject.clause, "what": reject.what}
    except Exception as error:  # a fault of the reader or of the storage: neither accepted nor rejected
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(value))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
