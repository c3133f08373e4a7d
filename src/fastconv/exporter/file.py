"""Composes the text of an exported file from its parts."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from fastconv._precision import Precision
from fastconv._version import __version__
from fastconv.exporter import plans
from fastconv.exporter.subject import Subject
from fastconv.kernels.family import FOLDER, Plan

PARTS = Path(__file__).parent / "parts"
# The device sources of the portable kernels, which every file has.
PORTABLE = ("direct/forward/kernel.cuh", "direct/wgrad/kernel.cuh", "direct/bias_grad.cuh")

_ABOUT = '''\
"""{title}

{convolutions} in one file, with CUDA kernels for the result and for all gradients.

    from model import ModelNew      # this file as model.py
    model = {example}.cuda()

    python model.py                 # compares with PyTorch: results, and speed

{requirements}

{tuning}

{arithmetic}

{contents}

Written by fastconv {version}: {command}
SPDX-License-Identifier: Apache-2.0
"""
'''
_REQUIREMENTS = """
Needs PyTorch 2.0.1 or newer on Python 3.10 or newer, an NVIDIA GPU of compute capability 7.0 or
newer, and nvcc (CUDA 11.8 or newer). Kernels are compiled when first used, for each geometry, and
kept in PyTorch's cache of extensions."""
_TUNING = """
Tuned for {what}, in {dtypes}, on {gpus}. Everything else is computed by portable kernels: other
sizes, strides, groups and types (float32, float16, bfloat16), channels-last tensors, older GPUs.
PyTorch's own convolution is never used as a fallback: what goes wrong raises an error."""
_RESULTS = """ Results are deterministic. Gradients cannot be differentiated again."""
_ARITHMETIC: dict[Precision | None, str] = {
    None: """
On tensor cores, float32 arithmetic follows PyTorch's setting, torch.backends.cudnn.allow_tf32;
other kernels compute in float32 throughout."""
    + _RESULTS,
    "tf32": """
On tensor cores, float32 is multiplied in TF32, whatever PyTorch's setting; other kernels compute in
float32 throughout."""
    + _RESULTS,
    "ieee": """
float32 arithmetic is as accurate as strict float32, whatever PyTorch's setting."""
    + _RESULTS,
}
_CONTENTS = """
In this file: device code, where each kernel begins with an explanation; host code; plans, which
give the constants and the grid of each launch; the code that calls PyTorch; ModelNew; a
self-check."""


def compose(subject: Subject, dtypes: Sequence[str], precision: Precision | None = None) -> str:
    """The text of the file for a subject, with plans tuned for the given types.

    ``precision`` is the arithmetic of float32; with None, PyTorch's setting decides at each call.
    """
    tuned, made = plans.text(subject.problems, dtypes, precision)
    sources = list(dict.fromkeys([*plans.sources(made), *PORTABLE]))
    call = ", ".join([subject.example, *map(repr, subject.input_shapes)])
    others = {}
    check = _body("self_check")
    if subject.layers != {"Conv2d"}:
        others = {"Other layers, by the same kernels": _body("layers")}
        check = _without(check, "pytorch_twin") + "\n\n" + _body("layer_twins")
    sections = {
        "Device code": _device_code(sources),
        "Host code": _host_code(),
        "Plans for the portable kernels, for any geometry": _body("portable"),
        "Tuned plans for the exported convolutions, by GPU": tuned,
        "Compiling, launching and autograd": _runtime(precision),
        **others,
        "The model": "\n" + subject.model,
        "Self-check: the only part that uses PyTorch's convolution": check,
    }
    return (
        _about(subject, dtypes, made, precision)
        + "\n"
        + _imports(subject.imports)
        + "".join(f"\n\n{_heading(title)}\n{text}" for title, text in sections.items())
        + f'\n\nif __name__ == "__main__":\n    self_check({call})\n'
    )


def _runtime(precision: Precision | None) -> str:
    line = "PRECISION: str | None = {}\n"
    head, tail = _body("runtime").split(line.format(None))
    return head + line.format("None" if precision is None else f'"{precision}"') + tail


def _about(
    subject: Subject,
    dtypes: Sequence[str],
    made: Sequence[Plan],
    precision: Precision | None,
) -> str:
    one = len(subject.problems) == 1
    tuning = _TUNING.format(
        what="these sizes" if one else "these convolutions",
        dtypes=" and ".join(dtypes),
        gpus=_gpus({plan.family for plan in made}),
    )
    paragraphs = {"requirements": _REQUIREMENTS, "tuning": tuning,
                  "arithmetic": _ARITHMETIC[precision], "contents": _CONTENTS}  # fmt: skip
    return _ABOUT.format(
        title=_quoted(f"{subject.title}."),
        convolutions=_convolutions(subject),
        example=subject.example,
        version=__version__,
        command=_quoted(subject.command),
        **{name: textwrap.fill(text.strip(), 100) for name, text in paragraphs.items()},
    )


def _convolutions(subject: Subject) -> str:
    if len(subject.problems) > 1:
        return "Convolutions"
    transposed = all("Transpose" in layer for layer in subject.layers)
    return "A transposed convolution" if transposed else "A convolution"


def _gpus(families: set[str]) -> str:
    others = (
        " and all others since Ampere"
        if families & {"dense", "grouped", "ampere", "depthwise"}
        else ""
    )
    cores = "the tensor cores of " if families & {"grouped", "hopper", "ampere"} else ""
    return f"{cores}Hopper GPUs{others}"


def _quoted(text: str) -> str:
    """Text that may be any file's name, escaped for a docstring."""
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def _heading(title: str) -> str:
    return f"# === {title} {'=' * (100 - len(title) - 7)}\n"


def _device_code(kernels: Sequence[str]) -> str:
    """The dictionary SOURCES: the kernels, and after them the headers that they include."""
    headers = [name for kernel in kernels for name in _headers(kernel)]
    names = dict.fromkeys([*kernels, *headers])  # a kernel may include another one
    parts = ["SOURCES = {}"]
    parts += [f'SOURCES["{name}"] = r"""\n{_device_text(name)}"""' for name in names]
    return "\n\n".join(parts) + "\n"


def _headers(source: str) -> list[str]:
    """The headers that a source includes, directly or not, each after those that include it."""
    text = (FOLDER / source).read_text(encoding="utf-8")
    direct = [line.split('"')[1] for line in text.splitlines() if line.startswith('#include "')]
    found = [*direct, *(name for header in direct for name in _headers(header))]
    return list(dict.fromkeys(reversed(found)))[::-1]


def _device_text(name: str) -> str:
    """A device source as files hold it: without extern "C", as kernels are in namespaces."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return text.replace("#pragma once\n", "").replace('extern "C" __global__', "__global__")


def _host_code() -> str:
    launcher, bindings = (
        (PARTS / name).read_text(encoding="utf-8") for name in ("launcher.cuh", "bindings.cc")
    )
    return f'LAUNCHER = r"""\n{launcher}"""\n\nBINDINGS = r"""\n{bindings}"""\n'


def _body(part: str) -> str:
    """The text of a part without its docstring and imports."""
    text = _part(part)
    first = next(node for node in ast.parse(text).body if not _is_head(node))
    lines = text.splitlines()
    start = first.lineno - 1
    while lines[start - 1].startswith(("#", "@")):  # comments and decorators of the first statement
        start -= 1
    body = "\n".join(lines[start:]) + "\n"
    return "\n" + body if isinstance(first, (ast.ClassDef, ast.FunctionDef)) else body


def _without(text: str, function: str) -> str:
    """The text of a part without one of its functions, which another part replaces."""
    found = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    node = next(node for node in found if node.name == function)
    lines = text.splitlines()
    del lines[node.lineno - 1 : (node.end_lineno or 0) + 2]  # with the two lines that follow it
    return "\n".join(lines) + "\n"


def _part(name: str) -> str:
    return (PARTS / f"{name}.py").read_text(encoding="utf-8")


def _is_head(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _imports(others: Iterable[str]) -> str:
    """All import statements of the parts and the model: the standard library's, then torch's."""
    plain: set[str] = set()
    members: dict[str, set[str]] = {}  # names imported from each module
    for text in (*map(_part, ("portable", "runtime", "self_check")), *others):
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import):
                plain.add(ast.unparse(node))
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                members.setdefault(node.module, set()).update(map(ast.unparse, node.names))
    lines = sorted(plain) + [
        f"from {module} import {', '.join(sorted(names))}"
        for module, names in sorted(members.items())
        if not module.startswith("fastconv")
    ]
    ours = [line for line in lines if line.split()[1].split(".")[0] == "torch"]
    return "\n".join([*(line for line in lines if line not in ours), "", *ours]) + "\n"
