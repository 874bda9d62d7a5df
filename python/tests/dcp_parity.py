"""Runs every row of `dcp_rows` with PyTorch's own storage and with a store, and writes the table of the book.

    python dcp_parity.py --write       # docs/src/guides/dcp-behaviour.md
"""

import argparse
import json
import tempfile
import traceback
from pathlib import Path

import dcp_rows_of_ranks  # noqa: F401
import dcp_rows_of_saves  # noqa: F401
import dcp_rows_of_values  # noqa: F401 - registers rows
import torch
import torch.distributed as dist
from dcp_rows import ROWS, SIDES, run
from ranks import on_ranks

PAGE = Path(__file__).parents[2] / "docs/src/guides/dcp-behaviour.md"
BEGIN = "<!-- The table below is written by python/tests/dcp_parity.py. -->"


def outcomes_of(rows, folder):
    """Outcomes of rows with both storages, by name of the row. An outcome that is no outcome begins with a mark."""
    found = {}
    for row in rows:
        for side in SIDES:
            try:
                outcome = run(row, side(folder / row.name / side.name))
            except BaseException:
                outcome = f"! {traceback.format_exc()}"
            if dist.is_initialized():
                every = [None] * dist.get_world_size()
                dist.all_gather_object(every, outcome)
                outcome = every[0] if len(set(every)) == 1 else json.dumps(every)
            found.setdefault(row.name, {})[side.name] = outcome
    return found


def on_rank(folder, world, names):
    chosen = [row for row in ROWS if row.world == int(world) and (not names or row.name in names.split(","))]
    found = outcomes_of(chosen, Path(folder))
    if dist.get_rank() == 0:
        Path(folder, f"outcomes-{world}.json").write_text(json.dumps(found))


def all_outcomes(folder, names=()):
    """Outcomes of all rows, or of the named ones."""
    found = outcomes_of([row for row in ROWS if row.world == 1 and (not names or row.name in names)], folder)
    for world in sorted({row.world for row in ROWS if row.world > 1 and (not names or row.name in names)}):
        on_ranks(world, folder, on_rank, folder, world, ",".join(names))
        found.update(json.loads((folder / f"outcomes-{world}.json").read_text()))
    return found


def is_wrong(row, outcomes):
    """Whether a row failed, or its outcomes are not as it says."""
    theirs, ours = (outcomes[side.name] for side in SIDES)
    return "! Traceback" in theirs + ours or (theirs == ours) != (row.differs is None)


def table(outcomes):
    """The table of the book."""
    lines = [BEGIN, ""]
    equal = sum(row.differs is None for row in ROWS)
    lines += [f"{len(ROWS)} rows; {equal} are equal, {len(ROWS) - equal} differ. Run with torch {torch.__version__.split('+')[0]}.", ""]
    for section in dict.fromkeys(row.section for row in ROWS):
        lines += [f"## {section}", "", "| action | ranks | outcome | row |", "|---|---|---|---|"]
        for row in ROWS:
            if row.section == section:
                lines.append(f"| {row.action} | {row.world} | {outcome_text(row, outcomes[row.name])} | `{row.name}` |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def page_with(found):
    """The page of the book with another table."""
    return PAGE.read_text().split(BEGIN)[0] + found


def outcome_text(row, outcomes):
    if row.differs is None:
        return "equal"
    theirs, ours = (outcomes[side.name].replace("|", "\\|") for side in SIDES)
    return f"**differs.** PyTorch: `{theirs}`; tensorcask: `{ours}`. {row.differs}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("rows", nargs="*", help="names of rows, instead of all")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = all_outcomes(Path(scratch), given.rows)
    def short(outcome):
        return f"! {outcome.strip().splitlines()[-1]}" if outcome.startswith("! ") else outcome

    for name, of_row in outcomes.items():
        row = next(row for row in ROWS if row.name == name)
        theirs, ours = (of_row[side.name] for side in SIDES)
        wrong = is_wrong(row, of_row)
        both = f"\n    PyTorch:    {short(theirs)}\n    tensorcask: {short(ours)}"
        print("WRONG" if wrong else "ok   ", name, "" if row.differs is None and not wrong else both)
    if given.write:
        PAGE.write_text(page_with(table(outcomes)))


if __name__ == "__main__":
    main()
