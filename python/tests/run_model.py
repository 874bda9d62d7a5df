"""Runs the model of lost and damaged stores for a chosen number of sequences: see ``python/tests/model``."""

import argparse
import sys

from model.runs import run_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=200, help="how many [200]")
    parser.add_argument("--seed", type=int, default=1, help="of the first sequence [1]")
    parser.add_argument("--url", help="s3://bucket/prefix; local disk if left out")
    parser.add_argument("--jobs", type=int, default=1, help="processes [1]")
    parser.add_argument("-v", "--verbose", action="store_true", help="show each act")
    given = parser.parse_args()
    report = run_all(range(given.seed, given.seed + given.sequences), given.url, given.jobs, given.verbose, not given.verbose)
    for outcome, count in sorted(report.outcomes.items()):
        print(f"{count:8} {outcome}")
    for violation in report.violations:
        print(violation)
    print(f"{report.sequences} sequences, {len(report.violations)} violations")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
