"""``fastconv tune``: measures which plans are fastest, and keeps those that beat the rules'."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from _fastconv_command.streams import INTERRUPTED
from fastconv import files
from fastconv.bench import tune
from fastconv.bench.cases import Case, reason
from fastconv.bench.console import work_through
from fastconv.commands import common
from fastconv.commands.common import UsageError, print_json, suite_files
from fastconv.jit import trust
from fastconv.kernels import tuned
from fastconv.timing import Effort


def run(arguments: Namespace) -> int:
    """Tunes the selected cases, and adds what it finds to a table; 1 if a case failed."""
    device = common.select_device(arguments.device)
    if device.type != "cuda":
        raise UsageError(f"only GPU kernels are tuned, and {device} is no GPU")
    selected = common.select_cases(arguments, device)
    table, advice = _table(arguments), common.memory_advice(arguments, device)
    found: dict[str, str] = {}
    failed: list[Case] = []
    tune.build(selected, device)

    def work(case: Case) -> str:
        try:
            result = tune.tune(case, device, Effort(arguments.repeats, arguments.row_seconds))
        except Exception as error:  # one failed row does not stop the others
            failed.append(case)
            return f"failed: {reason(error, advice)}"
        if result.choices:
            found.update(result.choices)
            tuned.add(table, result.choices)
        return result.brief

    finished = work_through(selected, lambda case: case.label, work, arguments.quiet)
    if arguments.json:
        print_json(found)
    else:
        where = f"; written to {table}" if found else ""
        print(f"{len(found)} of {len(selected)} rows improved, {len(failed)} failed{where}")
    if not finished:
        return INTERRUPTED
    return 1 if failed else 0


def _table(arguments: Namespace) -> Path:
    """The table that choices are added to, which need not exist yet.

    Raises:
        UsageError: the file is something else, or would not be trusted when plans are made.
    """
    path: Path = arguments.output or tuned.own()
    if arguments.output is None:
        if words := trust.distrusted(path):
            raise UsageError(
                f"{path} would not be used: {words}; remove the others' write permission, set "
                "FASTCONV_CACHE_DIR to a folder that is yours alone, or give --output"
            )
        files.make_folder(path.parent, private=True)
    files.check_outputs([path], suite_files(arguments))
    if path.is_file() and path.stat().st_size > 0:
        table = files.read_json(path)
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise UsageError(f"cannot add to {path}: it holds no table of fastconv tune")
    return path
