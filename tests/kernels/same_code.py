"""Compares what the compiler is given for every launch, before a change and after it.

    PYTHONPATH=src:tests python tests/kernels/same_code.py before.json  # in the old checkout
    PYTHONPATH=src:tests python tests/kernels/same_code.py after.json --before before.json

For a change that moves code, renames things or rewrites comments. Every launch that the suites and
300 lines of the coverage corpus plan on four architectures is taken apart into the files that the
compiler reads. Of each file, tokens without comments are compared, with identifiers numbered by
their first occurrence: equal files are the same code under other names. The names that changed are
listed, because a consistent exchange of two names of CUDA's would go unseen. ``--compile`` also
compiles that many launches, whose instructions and constants are compared section by section, and
so are launches whose files differ, if a file of titles names them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from emulator import corpus
from fastconv.jit import compile
from fastconv.kernels import gpus, planner
from fastconv.kernels.family import Kernel, Operands, Plan
from fastconv.workloads import SUITES

GPUS = ("sm_80", "sm_86", "sm_90a", "sm_100a")
# C++ type, bytes, precision of float32, channels-last.
MODES = (
    ("float", 4, "tf32", False),
    ("float", 4, "ieee", False),
    ("fastconv::bfloat16", 2, "ieee", False),
    ("fastconv::bfloat16", 2, "ieee", True),
)
PASSES = ("forward", "input_grad", "weight_grad")
LINES = 300
# Bank 4 of constants is not code: it has the addresses of all named constants of a program, also of
# those that no instruction reads.
CODE = (".text", ".nv.constant0", ".nv.constant2", ".nv.constant3", ".rodata", ".nv.shared")
TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|\d[\w.\']*|\w+|\s+|.', re.DOTALL
)
INCLUDE = re.compile(r'#include "[^"]+"')


def launches() -> Iterator[tuple[str, str, Kernel]]:
    """A title, an architecture and a kernel for every launch."""
    for suite, arch in ((suite, arch) for suite in SUITES for arch in GPUS):
        for workload in SUITES[suite]:
            for scalar, size, precision, last in MODES:
                layout = torch.channels_last if last else torch.contiguous_format
                shape = workload.problem.weight_shape
                stride = torch.empty(shape, device="meta", memory_format=layout).stride()
                for name in PASSES:
                    operands = Operands(
                        scalar, size, last, last, stride, True, precision, name == "weight_grad"
                    )
                    gpu = gpus.named(arch)
                    plan = getattr(planner, name)(workload.problem, operands, gpu)
                    title = f"{suite} {workload.name} {name} {scalar} {precision} {last} {arch}"
                    yield from _launches(title, arch, plan)
    cases = {corpus.line_of(case): case for case in corpus.read_cases()}
    for line in Random(0).sample(sorted(cases), LINES):
        yield from _launches(line, cases[line].gpu.architecture, cases[line].plan)


def _launches(title: str, arch: str, plan: Plan) -> Iterator[tuple[str, str, Kernel]]:
    for number, launch in enumerate(plan.launches):
        sizes = f"{launch.grid} {launch.block} {launch.shared_bytes}"
        yield f"{title} #{number} {sizes}", arch, launch.kernel


@cache
def numbered(text: str) -> tuple[str, tuple[str, ...]]:
    """A hash of a file's tokens with identifiers numbered, and the identifiers in that order."""
    names: dict[str, int] = {}
    digest = hashlib.sha256()
    for match in TOKEN.finditer(text):
        token = match[0]
        if token.isspace() or token[:2] in ("//", "/*"):
            continue
        is_name = token[0].isalpha() or token[0] == "_"
        digest.update(f"{names.setdefault(token, len(names)) if is_name else token}\n".encode())
    return digest.hexdigest()[:20], tuple(names)


def code(cubin: bytes) -> str:
    """A hash of the sections of an ELF file that hold instructions, constants and sizes."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + i * size) for i in range(count)]
    names = cubin[sections[names_at][4] :]
    parts = []
    for name_at, kind, _, _, at, length, *_ in sections:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        section = next((one for one in CODE if name.startswith(one)), None)
        if section is not None:
            contents = b"" if kind == 8 else cubin[at : at + length]  # 8: takes no place in a file
            parts.append((section, length, hashlib.sha256(contents).hexdigest()))
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:20]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--before", type=Path, help="what the old checkout has written")
    parser.add_argument("--compile", type=int, default=0, help="launches to compile in any case")
    parser.add_argument("--titles", type=Path, help="compile those of this file as well")
    arguments = parser.parse_args()
    found = {title: (arch, kernel) for title, arch, kernel in launches()}
    wanted = set(Random(1).sample(sorted(found), arguments.compile))
    if arguments.titles:
        wanted |= set(arguments.titles.read_text().splitlines())
    files: dict[str, tuple[str, ...]] = {}
    streams = {}
    for title, (_, kernel) in found.items():
        texts = (kernel.text, *compile.included(kernel.text).values())
        parts = dict(numbered(INCLUDE.sub("", text)) for text in texts)
        files |= parts
        entry = [names.index(kernel.entry) for names in parts.values() if kernel.entry in names]
        streams[title] = [*sorted(parts), *sorted(entry)]
    codes = {}
    for title in sorted(wanted):
        arch, kernel = found[title]
        codes[title] = code(compile.build(kernel, arch))
    after = {"streams": streams, "files": files, "codes": codes}
    arguments.output.write_text(json.dumps(after))
    print(f"{len(streams)} launches, {len(files)} files, {len(codes)} compiled")
    return compared(json.loads(arguments.before.read_text()), after) if arguments.before else 0


def compared(before: dict[str, Any], after: dict[str, Any]) -> int:
    streams, others = before["streams"], after["streams"]
    missing = sorted(streams.keys() ^ others.keys())
    unlike = sorted(one for one in streams.keys() & others.keys() if streams[one] != others[one])
    codes, other_codes = before["codes"], after["codes"]
    both = codes.keys() & other_codes.keys()
    wrong = sorted(one for one in both if codes[one] != other_codes[one])
    renamed = sorted(
        {
            (old, new)
            for file in before["files"].keys() & after["files"].keys()
            for old, new in zip(before["files"][file], after["files"][file], strict=True)
            if old != new
        }
    )
    print(f"launches that only one has: {len(missing)}; that differ as programs: {len(unlike)}; "
          f"compiled: {len(both)}, of which {len(wrong)} differ")  # fmt: skip
    for old, new in renamed:
        print(f"  {old} -> {new}")
    for title in (*missing[:20], *unlike[:40], *wrong):
        print(title)
    return int(bool(missing or wrong or set(unlike) - both))


if __name__ == "__main__":
    sys.exit(main())
