"""Command line for checkpoints of other formats: ``python -m tensorcask import SOURCE... STORE --step N``, and
``export``."""

from __future__ import annotations

import argparse
import sys

from . import _native
from ._frameworks import Unsupported
from .interchange import _format_of_folder, export, import_


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tensorcask", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    into = commands.add_parser("import", help="save a checkpoint of another format as a snapshot, or each version of a slime folder")
    into.add_argument("sources", nargs="+", metavar="SOURCE", help="safetensors, an index, a .pt file, or a folder")
    into.add_argument("store", metavar="STORE", help="path or URL")
    into.add_argument("--step", type=int, help="the training step; for slime folders, the step of --base")
    into.add_argument("--format", choices=["safetensors", "torch", "dcp", "slime"], help="[told by the source's name or content]")
    into.add_argument("--policy", default="adaptive", help="when to write a base [adaptive]")
    into.add_argument("--base", help="for slime folders: the checkpoint that the first delta builds on")
    into.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="class whose objects a .pt file or DCP folder may hold, such as argparse.Namespace; repeatable. Its code does not run: "
        "the attributes become plain values",
    )
    into.add_argument(
        "--on-unsupported", choices=["error", "skip"], default="error", help="what to do with values that cannot be stored [error]"
    )
    out = commands.add_parser("export", help="write a snapshot in another format")
    out.add_argument("store", metavar="STORE", help="path or URL")
    out.add_argument("target", metavar="TARGET", help="a file, or a folder that is not there or empty")
    out.add_argument("--step", type=int, help="[the newest]")
    out.add_argument("--format", choices=["safetensors", "torch", "dcp"], help="instead of what the target's name says")
    out.add_argument("--max-shard-bytes", type=int, metavar="N", help="split safetensors into shards with an index, in a folder")
    given = parser.parse_args(arguments)
    try:
        if given.command == "export":
            step = "latest" if given.step is None else given.step
            export(given.store, given.target, step=step, format=given.format, max_shard_bytes=given.max_shard_bytes)
            print(given.target)
        else:
            _import(parser, given)
    except Unsupported as error:
        print(f"error: {error}. To leave such values out, add --on-unsupported skip", file=sys.stderr)
        return 1
    except (_native.Error, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _import(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    from pathlib import Path

    first = Path(given.sources[0])
    kind = given.format or (_format_of_folder(first) if first.is_dir() else None)
    if kind == "slime":
        from .slime import import_deltas

        if len(given.sources) != 1:
            parser.error("give one folder of weight deltas")
        steps = import_deltas(first, given.store, base=given.base, base_step=given.step or 0, policy=given.policy)
        print(f"steps {', '.join(map(str, steps))}" if steps else "nothing new")
        return
    if given.step is None:
        parser.error("pass --step: these formats do not store the training step")
    saved = import_(
        given.sources,
        given.store,
        step=given.step,
        format=kind,
        policy=given.policy,
        allow=given.allow,
        on_unsupported=given.on_unsupported,
    )
    print(f"step {saved.step}: a {saved.kind}, {saved.stored_bytes} of {saved.tensor_bytes} bytes")


if __name__ == "__main__":
    sys.exit(main())
