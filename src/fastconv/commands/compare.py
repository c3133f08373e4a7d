"""``fastconv bench --compare``: prints what changed beyond noise between two results."""

from __future__ import annotations

from argparse import Namespace

from fastconv.bench import report, results
from fastconv.bench.console import show
from fastconv.commands.common import print_json


def compare(arguments: Namespace) -> int:
    """Prints the rows that changed between two files of results."""
    old, new = map(results.read, arguments.compare)
    found = list(results.changes(old, new))
    changed = [change for change in found if change.verdict != "same"]
    gone, added = results.unmatched(old, new)
    if arguments.json:
        print_json([change.to_dict() for change in found])
        return 0
    where = [one.environment.get("gpu", "CPU") for one in (old, new)]
    if where[0] != where[1]:
        print(f"beware: {where[0]} and {where[1]} are different machines")
    for path, one in zip(arguments.compare, (old, new), strict=True):
        for doubt in one.doubts:
            print(f"beware: {path}: {doubt}")
    if changed:
        show(report.changes_table(changed))
    same = len(found) - len(changed)
    print(f"{len(changed)} of {len(found)} rows changed beyond noise, {same} did not")
    if gone or added:
        print(f"{len(gone)} rows are in the old results alone, {len(added)} in the new alone")
    return 0
