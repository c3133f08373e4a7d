"""The arguments of the ``fastconv`` command. Nothing here imports the package, or PyTorch."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from _fastconv_command.choices import (
    AXES,
    BATCH,
    CPU_DIVISOR,
    DATA,
    DTYPES,
    EXPORTED_DTYPES,
    FORMAT_TRIPLES,
    FORMATS,
    GPUS,
    MODES,
    MOST_JOBS,
    NETWORKS,
    NORMAL,
    PASSES,
    PEERS,
    PLACED,
    PRECISIONS,
    SHAPE_SYNTAX,
    STEP,
    SUITES,
    WRITTEN,
)
from _fastconv_command.streams import BAD_INPUT

_INSTALL = "pip install 'fastconv[bench]'"
_PART_OF_SHAPE = re.compile(r"\d+(x\d+)+|(stride|padding|dilation|groups)=.*")
_ALL = "all"  # as an argument of --pass, short for the three passes


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses arguments, by default the process's; ``command`` is the name of the subcommand.

    Exits after ``--help`` and ``--version``, and after wrong arguments with the status 2.
    """
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.prog += f" {arguments.command}"  # whose help lists the options
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_advice(unknown)}")
    return arguments


def _advice(unknown: Sequence[str]) -> str:
    """What to say about arguments that look like the rest of a shape, which a shell has split."""
    if not any(_PART_OF_SHAPE.fullmatch(word) for word in unknown):
        return ""
    return '; a shape is one argument, in quotes: --shape "8x64x56x56 64x64x3x3 padding=1"'


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, where argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")


class _Passes(argparse.Action):
    """Stores the given passes once each, with "all" spelled out."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        spelled_out = (one for name in values for one in (PASSES if name == _ALL else (name,)))
        setattr(namespace, self.dest, list(dict.fromkeys(spelled_out)))


class _Version(argparse.Action):
    """Prints the version of the package, which it reads without importing the package."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        about = "print the version of fastconv and exit"
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=about)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        package = importlib.util.find_spec("fastconv")
        assert package is not None
        assert package.origin is not None
        read = runpy.run_path(str(Path(package.origin).with_name("_version.py")))
        print(f"fastconv {read['__version__']}")
        parser.exit()


def _parser() -> _Parser:
    parser = _Parser(
        prog="fastconv",
        description="Measures, verifies and describes this installation of fastconv, and exports "
        "convolutions as single files.",
        epilog="fastconv COMMAND --help lists the options of a command.",
    )
    parser.add_argument("--version", action=_Version)
    subcommands = parser.add_subparsers(required=True, metavar="command")
    output = _output_options("show no progress")
    needs_extra = f"Tables need an optional package: {_INSTALL}. --json does without."

    def add(name: str, about: str, **options: Any) -> argparse.ArgumentParser:
        added = _subparser(subcommands, name, about, **options)
        added.set_defaults(command=name)
        return added

    _add_bench(add(
        "bench", "compare fastconv's speed with PyTorch's", parents=[output], epilog=needs_extra
    ))  # fmt: skip
    _add_report(add(
        "report", "make tables, plots and a page from the results of bench",
        parents=[_output_options("print no tables")],
        epilog=f"Tables, plots and pages need optional packages: {_INSTALL}. --json, and "
        "--markdown with --quiet, do without.",
    ))  # fmt: skip
    _add_verify(add(
        "verify", "compare results, element by element, with float64", parents=[output],
        epilog=needs_extra,
    ))  # fmt: skip
    _add_demo(add(
        "demo", "verify and measure a few layers in a minute, and show the outcome on a page",
        epilog=f"It needs optional packages: {_INSTALL}.",
    ))  # fmt: skip
    _add_info(add(
        "info", "describe the machine, and the kernels for given shapes", parents=[output]
    ))  # fmt: skip
    _add_tune(add(
        "tune", "find the fastest kernels for given shapes by measuring", parents=[output]
    ))  # fmt: skip
    _add_build(add(
        "build", "compile the C++ host path now instead of at the first call", parents=[output]
    ))  # fmt: skip
    _add_bundle(add(
        "bundle", "write what an AOTInductor package's convolutions need on GPUs without Python"
    ))  # fmt: skip
    _add_cache(add("cache", "list, export, import or remove compiled kernels"), output)
    _add_export(add(
        "export", "write one Python file with a convolution and all of its kernels"
    ))  # fmt: skip
    return parser


def _subparser(subcommands: Any, name: str, about: str, **options: Any) -> _Parser:
    """Adds a parser; its own help begins with the line that the list of subcommands has."""
    description = f"{about[0].upper()}{about[1:]}."
    made: _Parser = subcommands.add_parser(name, help=about, description=description, **options)
    return made


def _output_options(quiet: str) -> _Parser:
    options = _Parser(add_help=False)
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options.add_argument("--quiet", action="store_true", help=quiet)
    return options


def _add_selection(
    parser: argparse.ArgumentParser, passes: Sequence[str], formats: Sequence[str] = FORMATS
) -> None:
    """Adds the options that select cases: the product of all their values is run."""
    each = (
        "; or three, of the input, the weight and the output's gradient: nhwc/nchw/nchw"
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
        help=f"the memory format: nchw (the default), nhwc (channels last, of volumes "
        f"ndhwc){each}",
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
        help="every convolution of these models of torchvision or timm, "
        f"for example resnet50, or of {', '.join(WRITTEN)}",
    )  # fmt: skip
    parser.add_argument(
        "--batch",
        type=_positive,
        metavar="N",
        help=f"the batch size of models (default: {BATCH})",
    )
    parser.add_argument(
        "--image", type=_positive, metavar="SIZE",
        help="the height and width of models' images and videos, or the length of their sequences "
        "(default: each model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--divisor", type=_positive, metavar="N",
        help="divide all sizes along axes, such as heights and widths, by N, which saves time and "
        f"memory (default: {CPU_DIVISOR} for suites on a CPU, else 1)",
    )  # fmt: skip


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, (*PASSES, STEP))
    _add_suites(parser)
    parser.add_argument(
        "--peer", choices=PEERS,
        help="what to compare with; pytorch (the default): PyTorch in the same memory format; "
        "best: the faster of both memory formats; compile: torch.compile with max-autotune",
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
        "--time-limit", type=_seconds, metavar="S",
        help="start no row after this many seconds; the rows left out are skipped",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the results to FILE, row by row"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true",
        help="list every row with the kernels that it would run, and run nothing",
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
        help=f"measure whole networks before and after fastconv.optimize: {', '.join(WRITTEN)}, "
        f"and models of torchvision or timm (default: {', '.join(NETWORKS)})",
    )  # fmt: skip
    parser.add_argument(
        "--mode", nargs="+", choices=MODES, metavar="MODE",
        help=f"for --networks: {', '.join(MODES)} (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--compile", action="store_true",
        help="for --networks: also measure both networks after torch.compile, without and with "
        "CUDA graphs",
    )  # fmt: skip
    parser.add_argument(
        "--commands", action="store_true", help="print the command that reproduces each row"
    )
    parser.set_defaults(passes=None, dtype=None, precision=None, format=None)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", type=Path, nargs="+",
        help="one or more files that bench --output wrote, also with --host or --networks",
    )  # fmt: skip
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables to FILE, as Markdown"
    )
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER",
        help="write PNG and SVG plots to FOLDER; with several files of results, to a subfolder "
        "for each",
    )  # fmt: skip
    parser.add_argument(
        "--html", type=Path, metavar="FILE",
        help="write a page to FILE, with plots and tables that can be sorted",
    )  # fmt: skip


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, PASSES, [*FORMATS, *FORMAT_TRIPLES])
    _add_suites(parser)
    parser.add_argument(
        "--random", type=_positive, metavar="N",
        help="verify N random cases instead; --pass, --dtype, --precision, --format and --axes "
        "restrict what is drawn",
    )  # fmt: skip
    parser.add_argument(
        "--axes", type=int, nargs="+", choices=AXES, metavar="AXES",
        help="with --random, layers of sequences (1), images (2) or volumes (3): one or more of "
        f"{', '.join(map(str, AXES))} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=_whole, metavar="S", help="the seed of all random numbers (default: 0)"
    )
    parser.add_argument(
        "--data", choices=DATA, help=f"the values of tensors: {_listed(DATA)} (default: {NORMAL})"
    )
    parser.add_argument(
        "--bias", action="store_true",
        help="add a bias in the forward pass, or compute its gradient with the weight's (not of "
        "transposed convolutions, where PyTorch sums it up)",
    )  # fmt: skip
    parser.add_argument(
        "--misaligned", nargs="*", choices=PLACED, metavar="TENSOR",
        help="place these tensors at odd addresses, as slices may be: "
        f"{', '.join(PLACED)}; all of them if none is named",
    )  # fmt: skip
    parser.add_argument(
        "--isolation", action="store_true",
        help="check only that no result depends on inputs that its formula does not read; this "
        "needs no float64 reference, so it is quick for layers of any size",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=_positive, metavar="J",
        help="run in J processes (default: 1; with --random on a GPU one for each core, at most "
        f"{MOST_JOBS})",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=_seconds, metavar="S",
        help="start no case after this many seconds; the cases left out are skipped",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write a summary and all failures to FILE"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the summary to FILE, as a table"
    )
    parser.set_defaults(passes=None, dtype=None, precision=None, format=None)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=Path, default=Path("demo"), metavar="FOLDER",
        help="write the results, the plots and the page to FOLDER (default: demo)",
    )  # fmt: skip
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if there is one)"
    )


def _add_info(parser: argparse.ArgumentParser) -> None:
    _add_selection(parser, PASSES)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="say why each kernel of the given shapes was chosen",
    )
    parser.add_argument(
        "--gpu", metavar="GPU",
        help="plan the given shapes for another GPU, which this machine need not have: "
        f"{', '.join(GPUS)}",
    )  # fmt: skip
    parser.set_defaults(suite=None, model=None, batch=None, image=None, divisor=None)


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


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="compile even if the library exists")
    parser.add_argument(
        "--deploy", type=Path, metavar="FOLDER",
        help="compile the library for programs without Python instead, and copy it to FOLDER as "
        "libfastconv.so, with its header fastconv.h",
    )  # fmt: skip


def _add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "package", type=Path, metavar="PACKAGE",
        help="a file that aoti_compile_and_package made; its machine code is executed",
    )  # fmt: skip
    parser.add_argument(
        "--inputs", type=Path, nargs="+", required=True, metavar="FILE",
        help="files of torch.save, each with a tensor or a tuple of arguments: the package is "
        "called with each, and the bundle has the forms of these calls",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the bundle to write"
    )
    parser.add_argument(
        "--gpu", nargs="+", default=[], metavar="GPU",
        help=f"plan for these GPUs (default: that of the inputs): {', '.join(GPUS)}",
    )  # fmt: skip


def _add_cache(parser: argparse.ArgumentParser, output: _Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action")

    def action(name: str, about: str, **options: Any) -> argparse.ArgumentParser:
        added = _subparser(actions, name, about, **options)
        added.set_defaults(command=f"cache {name}")
        return added

    action("list", "list what the cache holds", parents=[output])
    exporting = action(
        "export",
        "write the kernels that this installation uses to one file, for other machines; the "
        "library of the C++ host path is not in it",
    )  # fmt: skip
    importing = action(
        "import",
        "add the kernels of an exported file; they run with your rights: import only files that "
        "you trust",
    )  # fmt: skip
    clearing = action(
        "clear",
        "remove kernels, plans and times, and no other files; running processes are not affected",
    )  # fmt: skip
    exporting.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    importing.add_argument("file", type=Path, metavar="FILE", help="a file that cache export wrote")
    for parser in (exporting, clearing):
        parser.add_argument(
            "--architecture", metavar="ARCHITECTURE",
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
        "Model is exported with every convolution replaced",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write to FILE (default: print)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--attribute", default="", metavar="NAME",
        help="the attribute of ModelNew that holds its convolution (default: the function's name, "
        "for example conv2d)",
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
    parser.add_argument(
        "--precision", choices=PRECISIONS, metavar="PRECISION",
        help="the arithmetic of float32, tf32 or ieee, whatever PyTorch's setting (default: that "
        "setting, at each call)",
    )  # fmt: skip


def _listed(choices: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {about}" for name, about in choices.items())


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
