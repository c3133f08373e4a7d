"""The ``fastconv`` command: measures, verifies and describes this installation; exports files."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fastconv import commands, jit, native
from fastconv.bench import models
from fastconv.bench.campaign import MOST_JOBS
from fastconv.bench.cases import DTYPES, FORMAT_TRIPLES, FORMATS, PASSES, PRECISIONS, STEP
from fastconv.bench.console import MissingExtra
from fastconv.bench.contestants import PEERS
from fastconv.bench.networks import MODES, NETWORKS
from fastconv.bench.results import ResultsError
from fastconv.bench.trials import DATA, NORMAL, PLACED
from fastconv.exporter import DTYPES as EXPORTED_DTYPES
from fastconv.exporter import ExportError
from fastconv.files import FileError
from fastconv.jit import compile
from fastconv.kernels import gpus
from fastconv.kernels.family import Gpu
from fastconv.kernels.planner import SwitchError
from fastconv.workloads import SHAPE_SYNTAX, SUITES, WorkloadError

# What a user can mend: each says in a line what is wrong. Anything else is a bug, with a traceback.
_EXPECTED = (
    commands.UsageError, WorkloadError, ResultsError, MissingExtra, ExportError, FileError,
    jit.GpuUnavailable, jit.CompilationError, native.Unavailable, SwitchError, OSError,
    UnicodeEncodeError,
)  # fmt: skip
_ALL = "all"  # short for the three passes
_BAD_INPUT = 2
_BROKEN_PIPE = 141  # as shells report a program that wrote to nobody


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    0: all went well; 1: a row failed, or an error is above its bound; 2: bad arguments, or a file
    that cannot be read or written; 130: interrupted, with what was done kept; 141: nobody reads
    what is printed.
    """
    try:
        try:
            arguments = _parser().parse_args(argv)
            status: int = arguments.run(arguments)
            return status
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where it can be told that this failed
    except BrokenPipeError:
        _drop_output()
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        _complain("interrupted")
        return commands.INTERRUPTED
    except _EXPECTED as error:
        _complain(_in_a_line(error))
        _drop_output()
        return _BAD_INPUT


def _complain(text: str) -> None:
    with suppress(OSError):  # where nobody listens, the status has to do
        print(f"fastconv: {text}", file=sys.stderr, flush=True)


def _in_a_line(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, native.Unavailable):
        return text  # a C++ compiler's words are hard enough to read in lines
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'cannot write the output'}: {error.strerror}"
    return " ".join(text.split())


def _drop_output() -> None:
    """Sends nowhere what cannot be printed, or Python would try again at its end, and complain."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or replaced by a test's
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(argparse.ArgumentParser):
    """Complains in a line, where argparse prints all options first."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")


class _Passes(argparse.Action):
    """Stores passes one by one, whichever way they are given."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        single = (one for name in values for one in (PASSES if name == _ALL else (name,)))
        setattr(namespace, self.dest, list(dict.fromkeys(single)))


def _parser() -> _Parser:
    parser = _Parser(prog="fastconv", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="command")
    output = _output_options()
    _add_bench(subcommands.add_parser(
        "bench", parents=[output], help="compare fastconv's speed with PyTorch's"
    ))  # fmt: skip
    _add_report(subcommands.add_parser(
        "report", parents=[output], help="tables, plots and a page from the results of bench"
    ))  # fmt: skip
    _add_verify(subcommands.add_parser(
        "verify", parents=[output], help="check results, element by element, against float64"
    ))  # fmt: skip
    _add_info(subcommands.add_parser(
        "info", parents=[output], help="describe the machine, and what a shape would run"
    ))  # fmt: skip
    _add_tune(subcommands.add_parser(
        "tune", parents=[output], help="find the fastest kernels for shapes, by measuring"
    ))  # fmt: skip
    _add_build(subcommands.add_parser(
        "build", parents=[output], help="compile the host path in C++ now, not at the first call"
    ))  # fmt: skip
    _add_cache(
        subcommands.add_parser("cache", help="list, move or remove the kernels that are kept"),
        output,
    )
    _add_export(subcommands.add_parser(
        "export", help="write one Python file with a convolution and all of its kernels"
    ))  # fmt: skip
    return parser


def _output_options() -> _Parser:
    options = _Parser(add_help=False)
    options.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    options.add_argument("--quiet", action="store_true", help="show no progress")
    return options


def _add_selection(
    parser: argparse.ArgumentParser, passes: Sequence[str], formats: Sequence[str] = tuple(FORMATS)
) -> None:
    """What to work on; each option may be given several values."""
    each = "; or of input/weight/output's gradient: nhwc/nchw/nchw" if len(formats) > 2 else ""
    parser.add_argument("--shape", action="append", metavar="SHAPE", help=SHAPE_SYNTAX)
    parser.add_argument(
        "--pass", dest="passes", nargs="+", choices=(*passes, _ALL), default=list(PASSES),
        metavar="PASS", action=_Passes,
        help=f"of {', '.join(passes)}, or {_ALL}, the default: {', '.join(PASSES)}",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["float32"], metavar="DTYPE",
        help=f"of {', '.join(DTYPES)} (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", nargs="+", choices=PRECISIONS, default=["ieee"], metavar="PRECISION",
        help="arithmetic of float32: ieee (the default), tf32",
    )  # fmt: skip
    parser.add_argument(
        "--format", nargs="+", choices=formats, default=["nchw"], metavar="FORMAT",
        help=f"memory format: nchw (the default), nhwc (channels last){each}",
    )  # fmt: skip
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if there is one)"
    )


def _add_suites(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite", nargs="+", metavar="SUITE",
        help=f"of {', '.join(SUITES)}, or JSON files (default: founding, unless --shape or --model "
        "is given)",
    )  # fmt: skip
    parser.add_argument(
        "--model", nargs="+", action="extend", metavar="MODEL",
        help="every convolution of these models of torchvision or timm: resnet50, say",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=_positive, metavar="N", help=f"images of a model (default: {models.BATCH})"
    )
    parser.add_argument(
        "--image", type=_positive, metavar="SIZE",
        help="height and width of a model's images (default: the model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--divisor", type=_positive, metavar="N",
        help="divide height and width by N (default: 1; for suites on a CPU "
        f"{commands.CPU_DIVISOR})",
    )  # fmt: skip


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, (*PASSES, STEP))
    _add_suites(parser)
    parser.add_argument(
        "--peer", choices=PEERS,
        help="PyTorch in the same memory format (the default), the best of both formats, or "
        "torch.compile with max-autotune; of --networks also torch.compile, in its default mode",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=_positive, metavar="N",
        help="samples of each before looking at their spread (default: 7)",
    )  # fmt: skip
    parser.add_argument(
        "--row-seconds", type=_seconds, default=10.0, metavar="S",
        help="take no further samples of a row after this long (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=_seconds, metavar="S", help="begin no row after this many seconds"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the results there, row by row"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true",
        help="list every row and every legal kernel configuration, and run nothing",
    )  # fmt: skip
    instead.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OLD", "NEW"),
        help="say what changed beyond noise between two results, and run nothing",
    )  # fmt: skip
    instead.add_argument(
        "--host", action="store_true",
        help="measure how long the host takes to queue eager calls: a small convolution, networks",
    )  # fmt: skip
    instead.add_argument(
        "--networks", nargs="*", metavar="NETWORK",
        help="measure whole networks before and after fastconv.optimize: unet, or models of "
        f"torchvision or timm (default: {', '.join(NETWORKS)})",
    )  # fmt: skip
    parser.add_argument(
        "--mode", nargs="+", choices=MODES, metavar="MODE",
        help=f"of --networks: {', '.join(MODES)} (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--commands", action="store_true", help="print the command that reproduces each row"
    )
    parser.set_defaults(run=commands.bench, passes=None, dtype=None, precision=None, format=None)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", type=Path, nargs="+",
        help="what bench --output wrote; of several, one after the other",
    )  # fmt: skip
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER",
        help="write PNG and SVG plots there; of several results, to a folder for each in it",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page there")
    parser.set_defaults(run=commands.report_results)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, PASSES, [*FORMATS, *FORMAT_TRIPLES])
    _add_suites(parser)
    parser.add_argument(
        "--random", type=_positive, metavar="N",
        help="instead, N trials drawn at random, of all passes, types and formats unless some are "
        "given",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=_whole, metavar="S", help="what random numbers begin with (default: 0)"
    )
    parser.add_argument("--data", choices=DATA, help=f"{_listed(DATA)} (default: {NORMAL})")
    parser.add_argument(
        "--bias", action="store_true", help="with a bias, or its gradient beside the weight's"
    )
    parser.add_argument(
        "--misaligned", nargs="*", choices=PLACED, metavar="TENSOR",
        help="tensors at odd addresses, as slices may be: "
        f"{', '.join(PLACED)}; all of them if none is named",
    )  # fmt: skip
    parser.add_argument(
        "--isolation", action="store_true",
        help="instead, only whether results depend on what they should not: needs no reference, "
        "and so takes little time for layers of any size",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=_positive, metavar="J",
        help="processes (default: 1; with --random on a GPU one for each core, at most "
        f"{MOST_JOBS})",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=_seconds, metavar="S", help="begin no trial after this many seconds"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write a summary and what is wrong there"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the summary there, as a table"
    )
    parser.set_defaults(
        run=commands.verify_results, passes=None, dtype=None, precision=None, format=None
    )


def _add_info(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, PASSES)
    parser.add_argument(
        "--explain", action="store_true", help="what each choice of a kernel was made from"
    )
    parser.add_argument(
        "--gpu", type=_gpu, metavar="GPU",
        help=f"plan for another GPU, which need not be there: {', '.join(gpus.GPUS)}",
    )  # fmt: skip
    parser.set_defaults(
        run=commands.info, suite=None, model=None, batch=None, image=None, divisor=None
    )


def _add_tune(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, PASSES)
    _add_suites(parser)
    parser.add_argument(
        "--repeats", type=_positive, default=5, metavar="N", help="samples in a round (default: 5)"
    )
    parser.add_argument(
        "--row-seconds", type=_seconds, default=2.0, metavar="S",
        help="stop measuring a row after this long (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the table to add to (default: your own)"
    )
    parser.set_defaults(run=commands.tune_plans)


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="even if it is there")
    parser.set_defaults(run=commands.build_native)


def _add_cache(parser: argparse.ArgumentParser, output: _Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action")

    def action(name: str, run: Any, about: str, **options: Any) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=about, description=about, **options)
        added.set_defaults(run=run)
        return added

    action("list", commands.list_cache, "what is kept, and how much", parents=[output])
    exporting = action(
        "export", commands.export_cache,
        "write the kernels that this installation uses to one file, for other machines; the host "
        "path's library is not in it",
    )  # fmt: skip
    importing = action(
        "import", commands.import_cache,
        "add the kernels of such a file; they run with your rights: import only what you would run",
    )  # fmt: skip
    clearing = action(
        "clear", commands.clear_cache,
        "remove kernels, and no other files; processes that use them go on",
    )  # fmt: skip
    exporting.add_argument("file", type=Path, metavar="FILE", help="where to write")
    importing.add_argument("file", type=Path, metavar="FILE", help="what cache export wrote")
    for parser in (exporting, clearing):
        parser.add_argument(
            "--architecture", type=_architecture, metavar="ARCHITECTURE",
            help="only those for this one: sm_90a, say (default: all)",
        )  # fmt: skip


def _add_export(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--workload", metavar="NAME", help="a workload of the suites: dilated5x9, say"
    )
    what.add_argument("--shape", metavar="SHAPE", help=SHAPE_SYNTAX)
    what.add_argument(
        "--reference", type=Path, metavar="FILE",
        help="a Python file with Model, get_init_inputs and get_inputs, which is executed: its "
        "model with every nn.Conv2d replaced",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write there (default: print it)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--attribute", default="conv2d", metavar="NAME",
        help="what ModelNew calls its convolution (default: conv2d)",
    )  # fmt: skip
    form.add_argument(
        "--bare", dest="attribute", action="store_const", const=None,
        help="ModelNew is the convolution itself",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", nargs="+", choices=EXPORTED_DTYPES, default=["float32"], metavar="DTYPE",
        help=f"tune for these, of {', '.join(EXPORTED_DTYPES)} (default: float32); all work",
    )  # fmt: skip
    parser.set_defaults(run=commands.export_file)


def _listed(choices: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {about}" for name, about in choices.items())


def _gpu(text: str) -> Gpu:
    try:
        return gpus.named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _architecture(text: str) -> str:
    if not compile.is_architecture(text):
        raise argparse.ArgumentTypeError(f"should be like sm_80 or sm_90a, but got {text!r}")
    return text


def _positive(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**31:
        raise argparse.ArgumentTypeError(
            f"should be a whole number, at least {least}, but got {text!r}"
        )
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"should be seconds, at least 0, but got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
