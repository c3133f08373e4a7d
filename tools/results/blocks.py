"""Tables within pages that are written by hand: blocks that are made from the files of figures.

A block begins with a comment that says what it has, and ends with another:

    <!-- results: founding -->
    <!-- end -->

``founding`` has the founding workloads, ``networks`` whole networks, ``compiled`` those that were
also measured after ``torch.compile``, ``models`` the sums over all layers of networks.
``FILE; NAMES; PASSES; MODES`` has layers, where FILE is ``layers``, ``layers-ampere``,
``sequences`` or ``volumes``, and a mode has its memory format:

    <!-- results: layers; asym5x9 resnet50_03; forward input_grad; float32 tf32 nchw -->
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastconv.bench import report, results
from fastconv.bench.cases import PASSES, STEP
from fastconv.bench.network_results import NetworkResults, NetworkRow
from fastconv.bench.networks import CONFIGURATIONS, MODES
from fastconv.bench.results import Results, Row, Sum
from fastconv.workloads import FOUNDING, Workload
from results import catalogue

BLOCK = re.compile(
    r"(?P<begin><!-- results: (?P<what>[^\n]*?) -->\n)(?P<text>.*?)(?P<end><!-- end -->)", re.DOTALL
)
LAYERS = ("layers", "layers-ampere", "sequences", "volumes")  # files of figures of single layers
REFERENCE = "h200"  # the folder whose figures pages have; else, the first GPU's

PASS_NAMES = {
    **dict(zip(PASSES, ("forward", "input gradient", "weight gradient"), strict=True)),
    STEP: "training step",
}
FOUNDING_MODES = {
    ("float32 tf32", "nchw"): "TF32", ("float32 ieee", "nchw"): "ieee",
    ("bfloat16", "nhwc"): "bfloat16 NHWC",
}  # fmt: skip
NETWORK_NAMES = {
    "resnet18": "ResNet-18", "resnet50": "ResNet-50", "resnext50_32x4d": "ResNeXt-50 32x4d",
    "convnext_tiny": "ConvNeXt-T", "mobilenet_v2": "MobileNet-v2",
    "efficientnet_b0": "EfficientNet-B0", "inception_v3": "Inception-v3",
    "deeplabv3_resnet50": "DeepLabV3 with ResNet-50", "vgg16": "VGG-16",
    "vgg16_bn": "VGG-16 with BatchNorm", "unet": "U-Net", "r3d_18": "R3D-18", "unet3d": "3-D U-Net",
}  # fmt: skip
MODE_NAMES = {"float32 tf32": "TF32", "float32 ieee": "ieee", "bfloat16": "bfloat16"}
DTYPE_NAMES = {"float32": "TF32", "bfloat16": "bfloat16"}


Table = tuple[str, Sequence[Row] | Sequence[Sum] | Sequence[NetworkRow]]
"""A table, with what belongs below it, and the rows that it is made of."""


class BlockError(ValueError):
    """A block asks for something that there is not; the message says what."""


@dataclass(frozen=True)
class Block:
    """A block of a page: what it asks for, and its lines."""

    page: Path
    what: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [Block(page, found["what"], found["text"]) for found in BLOCK.finditer(text)]


def filled(page: Path) -> str:
    """The page's text with new blocks; a block whose file is not complete stays as it is."""

    def fill(found: re.Match[str]) -> str:
        made = block(found["what"], page)
        return found[0] if made is None else f"{found['begin']}{made}{found['end']}"

    return BLOCK.sub(fill, page.read_text(encoding="utf-8"))


def block(what: str, page: Path) -> str | None:
    """The lines of a block; None if not all of its file's figures are measured."""
    file, make = parsed(what)
    folder = _reference()
    path = folder and folder / f"{file}.json"
    if path is None or not path.exists():
        return None
    found = results.read_any(path)
    if len(found.rows) < int(found.environment["rows"]):
        return None
    text, rows = make(found)
    lines = [*([f"{report.UNSTEADY_NOTE}."] if "x?" in text else []), *report.slower(rows)]
    said = "".join(f"\n{_wrapped(line)}\n" for line in lines)
    link = os.path.relpath(path.with_suffix(".md"), page.parent)
    about = found.environment
    source = f"{about['gpu']}, commit {about['commit']}, {about['time'][:10]} ([table]({link}))."
    return f"\n{text}{said}\n{source}\n\n"


def parsed(what: str) -> tuple[str, Callable[[Any], Table]]:
    """The file that a block's figures are in, and the function that makes its table of them."""
    if what == "founding":
        return "layers", founding_table
    if what == "networks":
        return "networks", networks_table
    if what == "compiled":
        return "networks", compiled_table
    if what == "models":
        return "layers", models_table
    words = [one.strip() for one in what.split(";")]
    if len(words) != 4 or words[0] not in LAYERS:
        raise BlockError(f"no block {what!r}: tools/results/blocks.py says what there is")
    passes = words[2].split()
    if unknown := [one for one in passes if one not in PASS_NAMES]:
        raise BlockError(f"no pass {', '.join(unknown)} in the block {what!r}")
    modes = [(mode, format) for mode, _, format in map(_last_word, words[3].split(","))]
    return words[0], partial(layers_table, names=words[1].split(), passes=passes, modes=modes)


def _last_word(words: str) -> tuple[str, str, str]:
    return words.strip().rpartition(" ")


def founding_table(found: Results) -> Table:
    """The speed-ups of the founding workloads: a line for each mode, a column for each pass."""
    rows = {(r.case.workload.name, r.case.mode, r.case.format, r.case.direction): r
            for r in found.measured}  # fmt: skip
    lines, used = [("workload", "mode", *PASS_NAMES.values())], []
    for workload in FOUNDING:
        for (mode, format), name in FOUNDING_MODES.items():
            its = [rows.get((workload.name, mode, format, one)) for one in PASS_NAMES]
            used += [row for row in its if row]
            first = mode == next(iter(FOUNDING_MODES))[0]
            lines.append((_described(workload) if first else "", name, *map(ratio, its)))
    return _table(lines, left=2), used


def networks_table(found: NetworkResults) -> Table:
    """The speed-ups of whole networks: a column for each mode and number format."""
    columns = [(mode, dtype) for mode in MODES for dtype in CONFIGURATIONS]
    heads = [f"{mode} {DTYPE_NAMES[dtype]}" for mode, dtype in columns]
    lines: list[tuple[str, ...]] = [("network", "images", *heads)]
    rows = {(row.network, row.mode, row.configuration): row for row in found.measured}
    for network in dict.fromkeys(row.network for row in found.measured):
        its = [rows.get((network, mode, CONFIGURATIONS[dtype].name)) for mode, dtype in columns]
        images = next(row.images for row in its if row)
        lines.append((NETWORK_NAMES.get(network, network), images, *map(ratio, its)))
    means = [f"{one.mode} {one.mean:.2f}x" for one in found.overall]
    return f"{_table(lines, left=2)}\nGeometric means: {', '.join(means)}.\n", found.measured


def compiled_table(found: NetworkResults) -> Table:
    """Networks that were also compiled: a line for eager calls and each mode of torch.compile."""
    heads = ("network", "mode", "calls", "fastconv ms", "PyTorch ms", "speed-up", "first step s")
    lines: list[tuple[str, ...]] = [heads]
    used: list[NetworkRow] = []
    for row in (row for row in found.measured if row.compiled):
        head = (NETWORK_NAMES.get(row.network, row.network), f"{row.mode}, {row.configuration}")
        calls, ways = ("eager", *(one.name for one in row.compiled)), [row, *row.compiled_rows]
        for name, way in zip(calls, ways, strict=True):
            lines.append((*head, name, *_compiled_figures(way)))
            head = ("", "")
        used += ways
    remarks = "".join(f"\n{_wrapped(line)}.\n" for line in report.compiled_remarks(found))
    return f"{_table(lines, left=3)}{remarks}", used


def _compiled_figures(row: NetworkRow) -> tuple[str, ...]:
    """Both times, the speed-up, and the first step of both, which compiles."""
    ours, peer = (f"{one.ms:.4g}" if one else "failed" for one in (row.ours, row.peer))
    first = " / ".join(
        f"{one.first_call_ms / 1e3:.1f}" if one else "-" for one in (row.ours, row.peer)
    )
    return (ours, peer, ratio(row), first)


def models_table(found: Results) -> Table:
    """The speed-ups of the sums of all layers of networks: a column for each pass."""
    sums = {(one.model, one.mode, one.format, one.direction): one for one in found.sums}
    lines: list[tuple[str, ...]] = [("network", "mode", *(PASS_NAMES[one] for one in PASSES))]
    for model, mode, format in dict.fromkeys(key[:3] for key in sums):
        its = [sums.get((model, mode, format, one)) for one in PASSES]
        name = f"{MODE_NAMES[mode]} {format.upper()}"
        lines.append((NETWORK_NAMES.get(model, model), name, *map(ratio, its)))
    return _table(lines, left=2), found.sums


def layers_table(
    found: Results, names: Sequence[str], passes: Sequence[str], modes: Sequence[tuple[str, str]]
) -> Table:
    """Times, speed-ups and shares of limits; with one mode, its passes are the columns."""
    rows = {(r.case.workload.name, r.case.direction, r.case.mode, r.case.format): r
            for r in found.measured}  # fmt: skip
    known = {name: row.case.workload for (name, *_), row in rows.items()}
    if unknown := [name for name in names if name not in known]:
        raise BlockError(f"no layer is called {', '.join(unknown)}")
    heads = [f"{MODE_NAMES[mode]} {format.upper()}" for mode, format in modes]
    if len(modes) == 1:
        lines = [("layer", *(PASS_NAMES[one] for one in passes))]
        keys = [(_named(known[name]), [(name, one, *modes[0]) for one in passes]) for name in names]
    else:
        lines = [("layer", *heads)]
        keys = [
            (f"{_named(known[name])}, {PASS_NAMES[one]}", [(name, one, *mode) for mode in modes])
            for name in names
            for one in passes
        ]
    used = [rows[key] for _, its in keys for key in its if key in rows]
    lines += [(name, *(_figures(rows.get(key)) for key in its)) for name, its in keys]
    return _table(lines, left=1), used


def ratio(row: Row | Sum | NetworkRow | None) -> str:
    """A speed-up in two or three digits, with a question mark if its samples are unsteady."""
    if row is None or row.speedup is None:
        return ""
    digits = 2 if row.speedup < 3 else 1
    return f"{row.speedup:.{digits}f}x" + ("?" if row.unsteady else "")


def _figures(row: Row | None) -> str:
    """Our time, the speed-up and the share of the limit, marked "m" if that is memory's."""
    if row is None or row.ours is None or row.binding is None:
        return ""
    time = f"{row.ours.ms:.3g} ms" if row.ours.ms >= 1 else f"{row.ours.ms * 1e3:.3g} µs"
    memory = " m" if row.binding.name == "memory" else ""
    return f"{time}, {report.speedup(row)}, {row.share(row.ours):.0%}{memory}"


def _described(workload: Workload) -> str:
    """A founding workload's name and sizes."""
    dilation = workload.dilation
    dilated = f", dilation {dilation[0]}x{dilation[1]}" if dilation != (1, 1) else ""
    shapes = ", ".join("x".join(map(str, shape)) for shape in (workload.input, workload.weight))
    return f"{workload.name}: {shapes}{dilated}"


def _named(workload: Workload) -> str:
    """The name of a suite's layer; the sizes of a network's."""
    if not workload.model:
        return workload.name
    _, channels, *size = workload.input
    to = workload.output[1]
    kernel = "x".join(map(str, workload.weight[2:]))
    stride = f", stride {workload.stride[0]}" if set(workload.stride) != {1} else ""
    transposed = ", transposed" * workload.transposed
    grown = f"{channels} channels" if to == channels else f"{channels} to {to} channels"
    return f"{grown}, {kernel}{stride}{transposed}, {'x'.join(map(str, size))}"


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, 100, break_on_hyphens=False))


def _table(lines: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table; the first line is its heading, all columns but ``left`` align right."""
    rule = ["---"] * left + ["---:"] * (len(lines[0]) - left)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (lines[0], rule, *lines[1:]))


def _reference() -> Path | None:
    """The folder whose figures pages have; None if there is none."""
    gpus = [folder for folder in catalogue.folders() if folder.name != catalogue.CPU]
    preferred = [folder for folder in gpus if folder.name == REFERENCE]
    return next(iter(preferred or gpus), None)
