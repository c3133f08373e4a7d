"""``fastconv cache``: lists, exports, imports and removes the entries of the disk cache."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fastconv
from fastconv import files, tables
from fastconv.bench import info
from fastconv.commands.common import UsageError, print_json
from fastconv.jit import archive, cache, compile, trust


def list_entries(arguments: Namespace) -> int:
    """``fastconv cache list``: prints the entries, the most recently used first."""
    _check_folder()
    totals, entries = info.cache_state(), cache.entries()
    described = [(entry, cache.metadata(entry)) for entry in entries]
    if arguments.json:
        print_json({"cache": totals, "entries": [_to_dict(*one) for one in described]})
        return 0
    print("\n".join(info.cache_lines(totals)))
    rows = [_cells(*one) for one in described if one[0].kind != cache.PLAN]
    if rows:
        rows.insert(0, ("source", "architecture", "size", "last used"))
        print("", *tables.lines(rows, right={2}), sep="\n")
    return 0


def export_kernels(arguments: Namespace) -> int:
    """``fastconv cache export``: writes the kernels that this installation uses to one file."""
    _check_architecture(arguments)
    files.check_outputs([arguments.file])
    _check_folder()
    made_by = _versions()
    if words := trust.distrusted_folder(cache.folder()):
        raise UsageError(f"nothing in {cache.folder()} is used or exported: {words}")
    packed, left_out = _exportable(arguments.architecture)
    others = f"; {left_out} damaged or of other versions are left out" if left_out else ""
    if not packed:
        of = f" for {arguments.architecture}" if arguments.architecture else ""
        raise UsageError(f"no kernels{of} in {cache.folder()} can be exported{others}")
    contents = archive.encode(made_by, packed)
    files.write(arguments.file, contents)
    size = cache.in_units(len(contents))
    # To stderr, since FILE may be /dev/stdout.
    print(f"exported {len(packed)} kernels, {size}, to {arguments.file}{others}", file=sys.stderr)
    return 0


def import_kernels(arguments: Namespace) -> int:
    """``fastconv cache import``: adds the kernels of an exported file, all of them or none."""
    _check_folder()
    try:
        found = archive.decode(files.read_bytes(arguments.file))
    except archive.ArchiveError as error:
        raise UsageError(f"cannot import {arguments.file}: {error}") from error
    _check_usable(arguments.file, found)
    needed, limit = sum(map(len, found.packed.values())), cache.limit().bytes
    if needed > limit:
        raise UsageError(
            f"cannot import {arguments.file}: its kernels take {cache.in_units(needed)}, and at "
            f"most {cache.in_units(limit)} are kept; {cache.VARIABLE} may allow more"
        )
    added = cache.add(found.packed)
    known = len(found.packed) - added
    architectures = ", ".join(sorted({one["architecture"] for one in found.metadata.values()}))
    print(
        f"imported {added} kernels for {architectures} into {cache.folder()}"
        + (f"; {known} were there already" if known else "")
    )
    return 0


def clear(arguments: Namespace) -> int:
    """``fastconv cache clear``: removes entries, and no other files of the folder."""
    _check_architecture(arguments)
    _check_folder()
    architecture = arguments.architecture
    removed = cache.remove(
        entry
        for entry in cache.entries()
        if architecture in (None, cache.metadata(entry).get("architecture"))
    )
    of = f" for {architecture}" if architecture else ""
    size = cache.in_units(removed.bytes)
    print(f"removed {removed}{of}, {size}, from {cache.folder()}")
    return 0


def _check_architecture(arguments: Namespace) -> None:
    """Raises a UsageError if ``--architecture`` is given something else."""
    given = arguments.architecture
    if given is not None and not compile.is_architecture(given):
        raise UsageError(f"--architecture should be like sm_80 or sm_90a, but got {given!r}")


def _check_folder() -> None:
    """Raises a UsageError if no folder is chosen and the user has no home folder."""
    try:
        cache.folder()
    except RuntimeError as error:
        raise UsageError(f"{error} Set FASTCONV_CACHE_DIR to a folder for kernels.") from error


def _to_dict(entry: cache.Entry, metadata: Mapping[str, str]) -> dict[str, Any]:
    """An entry as JSON values; None where its metadata is missing."""
    return {
        "key": entry.path.stem,
        "kind": entry.kind,
        "source": metadata.get("source"),
        "architecture": metadata.get("architecture"),
        "bytes": entry.bytes,
        "used": datetime.fromtimestamp(entry.used, timezone.utc).isoformat(timespec="seconds"),
    }


def _cells(entry: cache.Entry, metadata: Mapping[str, str]) -> tuple[str, str, str, str]:
    """An entry as a row of a table."""
    source, architecture = (
        _printable(metadata.get(name, "unknown")) for name in ("source", "architecture")
    )
    used = datetime.fromtimestamp(entry.used).strftime("%Y-%m-%d %H:%M")
    return source, architecture, cache.in_units(entry.bytes), used


def _printable(text: str) -> str:
    """Text from an untrusted file, with the characters escaped that could control a terminal."""
    return text if text.isprintable() else ascii(text)


def _versions() -> dict[str, str]:
    """The versions that decide, beside the GPU, which kernels are used."""
    nvrtc = ".".join(map(str, compile.nvrtc_version()))
    return {"fastconv": fastconv.__version__, "nvrtc": nvrtc}


def _exportable(architecture: str | None) -> tuple[dict[str, bytes], int]:
    """The kernels of an architecture (None: of all) that this installation uses, by name.

    Also returns how many are left out because they are damaged or of other versions.
    """
    packed, left_out = dict[str, bytes](), 0
    for entry in cache.entries():
        if entry.kind != cache.KERNEL:  # plans and times are valid on this machine alone
            continue
        path = entry.path
        try:
            contents = trust.read(path)
            metadata, _ = cache.unpack(path.name, contents)
        except (OSError, cache.Damaged):
            left_out += 1
            continue
        if architecture not in (None, metadata.get("architecture")):
            continue
        if compile.is_current(path.name, metadata):
            packed[path.name] = contents
        else:
            left_out += 1
    return packed, left_out


def _check_usable(path: Path, found: archive.Archive) -> None:
    """Raises a UsageError if a file holds kernels that this installation would never load."""
    stale = [name for name, one in found.metadata.items() if not compile.is_current(name, one)]
    if stale:
        theirs, ours = (
            f"fastconv {versions.get('fastconv')} with NVRTC {versions.get('nvrtc')}"
            for versions in (found.made_by, _versions())
        )
        raise UsageError(
            f"cannot import {path}: {len(stale)} of its {len(found.packed)} kernels would never be "
            f"used here. It was made by {_printable(theirs)}, and this is {ours}: a kernel is used "
            "only with the sources, options and compiler that it was compiled from"
        )
