"""The ``fastconv`` command: parses its arguments, runs a subcommand, and reports errors."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fastconv import jit, native
from fastconv.bench import models
from fastconv.bench.campaign import MOST_JOBS
from fastconv.bench.cases import DTYPES, FORMAT_TRIPLES, FORMATS, PASSES, PRECISIONS, STEP
from fastconv.bench.console import MissingExtra
from fastconv.bench.contestants import PEERS
from fastconv.bench.networks import MODES, NETWORKS
from fastconv.bench.results import ResultsError
from fastconv.bench.trials import DATA, NORMAL, PLACED
from fastconv.commands import bench, build, cache, common, export, info, report, tune, verify
from fastconv.exporter import DTYPES as EXPORTED_DTYPES
from fastconv.exporter import ExportError
from fastconv.files import FileError
from fastconv.jit import compile
from fastconv.kernels import gpus
from fastconv.kernels.family import Gpu
from fastconv.kernels.planner import SwitchError
from fastconv.workloads import SHAPE_SYNTAX, SUITES, WorkloadError

# Errors that a user can mend: their message is printed in one line. Any other exception is a bug,
# and keeps its traceback.
_EXPECTED = (
    common.UsageError, WorkloadError, ResultsError, MissingExtra, ExportError, FileError,
    jit.GpuUnavailable, jit.CompilationError, native.Unavailable, SwitchError, OSError,
    UnicodeEncodeError,
)  # fmt: skip
_ALL = "all"  # as an argument of --pass, short for the three passes

# Exit statuses. 141 is 128 + SIGPIPE, as shells report a program whose reader is gone.
_BAD_INPUT = 2
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    0: success; 1: a row failed, or an error exceeds its bound; 2: bad arguments, or a file that
    cannot be read or written; 130: interrupted, and the rows up to then are kept; 141: the reader
    of the output is gone.
    """
    try:
        try:
            arguments = _parser().parse_args(argv)
            status: int = arguments.run(arguments)
            return status
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # so that a failure is reported below
    except BrokenPipeError:
        _drop_output()
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        _complain("interrupted")
        return common.INTERRUPTED
    except _EXPECTED as error:
        _complain(_in_a_line(error))
        _drop_output()
        return _BAD_INPUT


def _complain(text: str) -> None:
    with suppress(OSError):  # if stderr is closed, the exit status has to suffice
        print(f"fastconv: {text}", file=sys.stderr, flush=True)


def _in_a_line(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, native.Unavailable):
        return text  # a C++ compiler's output keeps its line breaks
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'cannot write the output'}: {error.strerror}"
    return " ".join(text.split())


def _drop_output() -> None:
    """Redirects the streams that cannot be flushed to the null device.

    Otherwise Python would flush them again as it exits, and print an error of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or no file of the system
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, where argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")


class _Passes(argparse.Action):
    """Stores the given passes once each, with "all" spelled out."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        spelled_out = (one for name in values for one in (PASSES if name == _ALL else (name,)))
        setattr(namespace, self.dest, list(dict.fromkeys(spelled_out)))


def _parser() -> _Parser:
    parser = _Parser(
        prog="fastconv",
        description="Measures, verifies and describes this installation of fastconv, and exports "
        "convolutions as single files.",
    )
    subcommands = parser.add_subparsers(required=True, metavar="command")
    output = _output_options()
    _add_bench(subcommands.add_parser(
        "bench", parents=[output], help="compare fastconv's speed with PyTorch's"
    ))  # fmt: skip
    _add_report(subcommands.add_parser(
        "report", parents=[output], help="make tables, plots and a page from the results of bench"
    ))  # fmt: skip
    _add_verify(subcommands.add_parser(
        "verify", parents=[output], help="compare results, element by element, with float64"
    ))  # fmt: skip
    _add_info(subcommands.add_parser(
        "info", parents=[output], help="describe the machine, and the kernels for given shapes"
    ))  # fmt: skip
    _add_tune(subcommands.add_parser(
        "tune", parents=[output], help="find the fastest kernels for shapes by measuring"
    ))  # fmt: skip
    _add_build(subcommands.add_parser(
        "build", parents=[output], help="compile the C++ host path now, not at the first call"
    ))  # fmt: skip
    _add_cache(
        subcommands.add_parser("cache", help="list, export, import or remove compiled kernels"),
        output,
    )
    _add_export(subcommands.add_parser(
        "export", help="write one Python file with a convolution and all of its kernels"
    ))  # fmt: skip
    return parser


def _output_options() -> _Parser:
    options = _Parser(add_help=False)
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options.add_argument("--quiet", action="store_true", help="show no progress")
    return options


def _add_selection(
    parser: argparse.ArgumentParser, passes: Sequence[str], formats: Sequence[str] = tuple(FORMATS)
) -> None:
    """Adds the options that select cases: the product of all their values is run."""
    each = (
        "; or one each for the input, the weight and the output's gradient: nhwc/nchw/nchw"
        if len(formats) > 2
        else ""
    )
    parser.add_argument(
        "--shape", action="append", metavar="SHAPE",
        help=f"a convolution, {SHAPE_SYNTAX}; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--pass", dest="passes", nargs="+", choices=(*passes, _ALL), default=list(PASSES),
        metavar="PASS", action=_Passes,
        help=f"one or more of {', '.join(passes)}; {_ALL}, the default, is {', '.join(PASSES)}",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["float32"], metavar="DTYPE",
        help=f"one or more of {', '.join(DTYPES)} (default: float32)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", nargs="+", choices=PRECISIONS, default=["ieee"], metavar="PRECISION",
        help="the arithmetic of float32 cases: ieee (the default), tf32",
    )  # fmt: skip
    parser.add_argument(
        "--format", nargs="+", choices=formats, default=["nchw"], metavar="FORMAT",
        help=f"the memory format: nchw (the default), nhwc (channels last){each}",
    )  # fmt: skip
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if there is one)"
    )


def _add_suites(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite", nargs="+", metavar="SUITE",
        help=f"one or more of {', '.join(SUITES)}, or JSON files (default: founding, unless "
        "--shape or --model is given)",
    )  # fmt: skip
    parser.add_argument(
        "--model", nargs="+", action="extend", metavar="MODEL",
        help="every convolution of these models of torchvision or timm, for example resnet50",
    )  # fmt: skip
    parser.add_argument(
        "--batch",
        type=_positive,
        metavar="N",
        help=f"the batch size of models (default: {models.BATCH})",
    )
    parser.add_argument(
        "--image", type=_positive, metavar="SIZE",
        help="the height and width of models' images (default: each model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--divisor", type=_positive, metavar="N",
        help="divide heights and widths by N (default: 1; for suites on a CPU "
        f"{common.CPU_DIVISOR})",
    )  # fmt: skip


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, (*PASSES, STEP))
    _add_suites(parser)
    parser.add_argument(
        "--peer", choices=PEERS,
        help="what to compare with; pytorch (the default): PyTorch in the same memory format; "
        "best: the faster of both memory formats; compile: torch.compile with max-autotune, or "
        "with --networks in its default mode beside eager PyTorch",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=_positive, metavar="N",
        help="samples of each contestant before their spread is judged (default: 7)",
    )  # fmt: skip
    parser.add_argument(
        "--row-seconds", type=_seconds, default=10.0, metavar="S",
        help="take no further samples of a row after this many seconds (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=_seconds, metavar="S", help="start no row after this many seconds"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the results to FILE, row by row"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true",
        help="list every row with every legal kernel configuration, and run nothing",
    )  # fmt: skip
    instead.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OLD", "NEW"),
        help="print what changed beyond noise between two results, and run nothing",
    )  # fmt: skip
    instead.add_argument(
        "--host", action="store_true",
        help="measure how long the host takes to queue eager calls of a small convolution and of "
        "networks",
    )  # fmt: skip
    instead.add_argument(
        "--networks", nargs="*", metavar="NETWORK",
        help="measure whole networks before and after fastconv.optimize: unet, and models of "
        f"torchvision or timm (default: {', '.join(NETWORKS)})",
    )  # fmt: skip
    parser.add_argument(
        "--mode", nargs="+", choices=MODES, metavar="MODE",
        help=f"for --networks: {', '.join(MODES)} (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--commands", action="store_true", help="print the command that reproduces each row"
    )
    parser.set_defaults(run=bench.run, passes=None, dtype=None, precision=None, format=None)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", type=Path, nargs="+",
        help="one or more files that bench --output wrote",
    )  # fmt: skip
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables to FILE, as Markdown"
    )
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER",
        help="write PNG and SVG plots to FOLDER; of several results, to a subfolder for each",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page to FILE")
    parser.set_defaults(run=report.run)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, PASSES, [*FORMATS, *FORMAT_TRIPLES])
    _add_suites(parser)
    parser.add_argument(
        "--random", type=_positive, metavar="N",
        help="instead, verify N cases drawn at random, of all passes, types and formats unless "
        "some are given",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=_whole, metavar="S", help="the seed of all random numbers (default: 0)"
    )
    parser.add_argument(
        "--data", choices=DATA, help=f"the values of tensors: {_listed(DATA)} (default: {NORMAL})"
    )
    parser.add_argument(
        "--bias", action="store_true", help="add a bias, or compute its gradient with the weight's"
    )
    parser.add_argument(
        "--misaligned", nargs="*", choices=PLACED, metavar="TENSOR",
        help="place these tensors at odd addresses, as slices may be: "
        f"{', '.join(PLACED)}; all of them if none is named",
    )  # fmt: skip
    parser.add_argument(
        "--isolation", action="store_true",
        help="instead, check only that no result depends on inputs that it should not depend on: "
        "this needs no reference, and is quick for layers of any size",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=_positive, metavar="J",
        help="run in J processes (default: 1; with --random on a GPU one for each core, at most "
        f"{MOST_JOBS})",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=_seconds, metavar="S", help="start no case after this many seconds"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write a summary and all failures to FILE"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the summary to FILE, as a table"
    )
    parser.set_defaults(run=verify.run, passes=None, dtype=None, precision=None, format=None)


def _add_info(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, PASSES)
    parser.add_argument("--explain", action="store_true", help="say why each kernel was chosen")
    parser.add_argument(
        "--gpu", type=_gpu, metavar="GPU",
        help=f"plan for another GPU, which this machine need not have: {', '.join(gpus.GPUS)}",
    )  # fmt: skip
    parser.set_defaults(run=info.run, suite=None, model=None, batch=None, image=None, divisor=None)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, PASSES)
    _add_suites(parser)
    parser.add_argument(
        "--repeats",
        type=_positive,
        default=5,
        metavar="N",
        help="samples of each plan in a round (default: 5)",
    )
    parser.add_argument(
        "--row-seconds", type=_seconds, default=2.0, metavar="S",
        help="stop measuring a row after this many seconds (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the table to add to (default: the one in your cache folder)",
    )
    parser.set_defaults(run=tune.run)


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="compile even if the library exists")
    parser.set_defaults(run=build.run)


def _add_cache(parser: argparse.ArgumentParser, output: _Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action")

    def action(name: str, run: Any, about: str, **options: Any) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=about, description=about, **options)
        added.set_defaults(run=run)
        return added

    action("list", cache.list_entries, "list what the cache holds", parents=[output])
    exporting = action(
        "export", cache.export_kernels,
        "write the kernels that this installation uses to one file, for other machines; the "
        "library of the C++ host path is not in it",
    )  # fmt: skip
    importing = action(
        "import", cache.import_kernels,
        "add the kernels of an exported file; they run with your rights: import only files that "
        "you trust",
    )  # fmt: skip
    clearing = action(
        "clear", cache.clear,
        "remove kernels, plans and times, and no other files; running processes are not affected",
    )  # fmt: skip
    exporting.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    importing.add_argument("file", type=Path, metavar="FILE", help="a file that cache export wrote")
    for parser in (exporting, clearing):
        parser.add_argument(
            "--architecture", type=_architecture, metavar="ARCHITECTURE",
            help="only the kernels for this architecture, for example sm_90a (default: all)",
        )  # fmt: skip


def _add_export(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--workload", metavar="NAME", help="a workload of the suites, for example dilated5x9"
    )
    what.add_argument("--shape", metavar="SHAPE", help=f"a convolution, {SHAPE_SYNTAX}")
    what.add_argument(
        "--reference", type=Path, metavar="FILE",
        help="a Python file with Model, get_init_inputs and get_inputs, which is executed; its "
        "Model is exported with every nn.Conv2d replaced",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write to FILE (default: print)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--attribute", default="conv2d", metavar="NAME",
        help="the attribute of ModelNew that holds its convolution (default: conv2d)",
    )  # fmt: skip
    form.add_argument(
        "--bare", dest="attribute", action="store_const", const=None,
        help="make ModelNew the convolution itself",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", nargs="+", choices=EXPORTED_DTYPES, default=["float32"], metavar="DTYPE",
        help=f"tune for one or more of {', '.join(EXPORTED_DTYPES)} (default: float32); the file "
        "computes correctly in all of them",
    )  # fmt: skip
    parser.set_defaults(run=export.run)


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
