"""``fastconv.bundle``: writes what a model's calls need on GPUs where there is no Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastconv import files, native
from fastconv.backends import cuda
from fastconv.errors import ExportError
from fastconv.exporter import bundle_file
from fastconv.exporter.bundle_file import Planned
from fastconv.jit import pool
from fastconv.kernels import gpus as known_gpus
from fastconv.kernels.family import Gpu, Kernel
from fastconv.ops import entries


class Form(NamedTuple):
    """A form of call that a model has made."""

    key: list[int]
    operator: str
    shapes: tuple[tuple[int, ...], ...]  # of the operator's tensors
    dtype: torch.dtype
    device: torch.device
    outline: entries.Outline


def bundle(
    model: Callable[..., Any] | str | os.PathLike[str],
    *examples: Any,
    output: str | os.PathLike[str],
    gpus: Sequence[str] = (),
) -> Path:
    """Writes a bundle: all that calls of a model on GPUs need where there is no Python.

    The model is called with each example, on the examples' device, and the forms of the
    convolutions that it computes are recorded: shapes, strides, types, alignment, geometry and
    precision. They are planned and compiled for each GPU, and written to one file. The library
    ``libfastconv.so`` of ``fastconv build --deploy`` reads it in programs without Python, where
    any other form is an error. Convolutions on a CPU need no bundle.

    Give the package that will be deployed, since compiling changes what a model calls. Call this
    under the precision settings that the program will have.

    Args:
        model: the path of a package that ``torch._inductor.aoti_compile_and_package`` has made, or
            any function of tensors.
        *examples: what it is called with, each a tensor or a tuple of arguments. A package with
            dynamic shapes needs an example of each shape that it will be given.
        output: the file to write.
        gpus: the architectures to plan for, for example "sm_90"; by default the GPUs of the
            examples. For the architecture of a GPU of this machine, that GPU is planned for, and
            otherwise the one in the table of supported GPUs. Plans run on GPUs with as many SMs.

    Returns:
        The path of the file.

    Raises:
        fastconv.ExportError: the file cannot be written, an architecture is unknown, the model
            computes no convolution of ours on a GPU, or something that needs Python: convolutions
            of complex numbers, batch normalization.
        fastconv.FastconvError: the native host path, which records forms, or a kernel cannot be
            compiled.

    Examples:
        >>> model = fastconv.Conv2d(3, 8, 3, padding=1)
        >>> images = torch.randn(2, 3, 16, 16)
        >>> if torch.cuda.is_available():
        ...     path = fastconv.bundle(model.cuda(), images.cuda(), output="model.fastconv")
    """
    path = Path(output)
    try:
        files.check_outputs([path], [] if callable(model) else [os.fspath(model)])
        forms = record(_callable(model), examples)
        on_gpus = [form for form in forms if form.device.type == "cuda"]
        if not on_gpus:
            raise ExportError(
                "there is nothing to bundle: the model has called no operator of fastconv on a "
                f"GPU, and {len(forms)} of its forms on a CPU, where they need no bundle"
            )
        files.write(path, compose(on_gpus, chosen_gpus(gpus, on_gpus)))
    except files.FileError as error:
        raise ExportError(str(error)) from error
    return path


def _callable(model: Callable[..., Any] | str | os.PathLike[str]) -> Callable[..., Any]:
    """Returns the model, or a function that calls a package and reports its errors."""
    if callable(model):
        return model
    path = os.fspath(model)
    if not Path(path).is_file():
        raise ExportError(f"there is no package {path}")
    try:
        package = torch._inductor.aoti_load_package(path)
    except RuntimeError as error:
        raise ExportError(f"cannot load the package {path}: {error}") from error

    def call(*arguments: Any) -> None:
        try:
            package(*arguments)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ExportError(f"calling the package {path} failed: {error}") from error

    return call


def record(model: Callable[..., Any], examples: Iterable[Any]) -> list[Form]:
    """Calls the model with each example, and returns the forms of its calls of our operators."""
    forms: dict[tuple[int, ...], Form] = {}

    def note(key: list[int] | None, operator: str, *args: Any) -> None:
        if key is None:
            raise ExportError(
                f"fastconv::{operator} cannot be bundled: batch normalization needs Python. In "
                "evaluation mode, fastconv.conv_bn_act and its layers are convolutions"
            )
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        about = (operator, shapes, tensors[0].dtype, tensors[0].device)
        forms[tuple(key)] = Form(key, *about, entries.outline(operator, *args))

    with native.recorded_forms(note):
        for example in examples:
            model(*(example if isinstance(example, tuple) else (example,)))
    return list(forms.values())


def chosen_gpus(names: Sequence[str], forms: Sequence[Form]) -> list[Gpu]:
    """Returns the GPUs of these architectures, or those that the forms were recorded on."""
    used = [cuda.gpu(form.device.index) for form in forms if form.device.type == "cuda"]
    present = {gpu.architecture: gpu for gpu in used}
    try:
        named = [known_gpus.named(name) for name in names]
    except ValueError as error:
        raise ExportError(str(error)) from error
    chosen = [present.get(gpu.architecture, gpu) for gpu in named] or used
    return list(dict.fromkeys(chosen))


def compose(forms: Sequence[Form], gpus: Sequence[Gpu]) -> bytes:
    """Plans and compiles the forms for each GPU, and returns the bundle's bytes."""
    planned = [_planned(form, gpu) for gpu in gpus for form in forms]
    cubins: dict[tuple[str, Kernel], bytes] = {}
    for architecture in {gpu.architecture for gpu in gpus}:
        on_it = (one for one in planned if one.gpu.architecture == architecture)
        kernels = list(dict.fromkeys(launch.kernel for one in on_it for launch in one.launches))
        for kernel, cubin in zip(kernels, pool.build_all(kernels, architecture), strict=True):
            cubins[architecture, kernel] = cubin
    return bundle_file.encode(planned, cubins)


def _planned(form: Form, gpu: Gpu) -> Planned:
    entry, need, is_empty = form.outline
    if need is None:
        if form.dtype.is_complex and not is_empty:
            raise ExportError(
                f"fastconv::{form.operator} of {form.dtype} tensors of sizes "
                f"{', '.join(map(str, map(list, form.shapes)))} cannot be bundled: on GPUs, "
                "convolutions of complex numbers need Python"
            )
        return Planned(form.key, gpu, entry, not is_empty, None, ())
    plan = cuda.planned(need, gpu)
    return Planned(form.key, gpu, entry, False, plan, cuda.TENSORS[need.plan])
