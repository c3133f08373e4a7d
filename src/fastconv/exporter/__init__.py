"""``fastconv.export``: writes one Python file with a convolution and all of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from fastconv import files
from fastconv._precision import Precision
from fastconv.errors import ExportError
from fastconv.exporter.bundles import bundle
from fastconv.exporter.common import DTYPES

__all__ = ["DTYPES", "ExportError", "bundle", "export"]


def export(
    workload: str | None = None,
    *,
    shape: str | None = None,
    reference: str | Path | None = None,
    output: str | Path | None = None,
    attribute: str | None = "",
    dtypes: Sequence[Literal["float32", "float16", "bfloat16"]] = ("float32",),
    precision: Precision | None = None,
) -> str:
    """Writes one Python file whose ``ModelNew`` convolves with kernels of its own.

    The file needs only PyTorch (2.0.1 or newer) and nvcc. It has tuned kernels for the exported
    convolutions on GPUs since Ampere, and portable kernels for all other geometries and for GPUs
    since Volta. Give one of ``workload``, ``shape`` and ``reference``.

    Args:
        workload: the name of one of the benchmark's workloads, for example "dilated5x9".
        shape: sizes of input and weight and, where they differ from PyTorch's defaults, stride,
            padding, dilation and groups: ``"8x32x64x64 64x32x5x9 padding=2,4"``. Sequences have no
            height, ``"8x32x4096 64x32x3"``, and volumes a depth, ``"2x8x16x64x64 8x8x3x3x3"``;
            ``"8x32x64x64 32x16x4x4 transposed stride=2"`` is a transposed convolution, which may
            have an ``output_padding``.
        reference: a Python file with a class ``Model``, and functions ``get_init_inputs`` and
            ``get_inputs`` that return the arguments of its constructor and of its ``forward``. The
            file is executed. ``ModelNew`` is its ``Model`` with every convolution of ``torch.nn``
            replaced: ``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d`` and the transposed ones.
        output: the file to write; the text is returned in any case.
        attribute: the attribute of ``ModelNew`` that holds its convolution, which also names the
            parameters in the state dict. By default it is named after PyTorch's function, for
            example ``conv2d``. With None, ``ModelNew`` is the convolution itself. Has no effect on
            a reference's model.
        dtypes: the types to tune for, of "float32", "float16" and "bfloat16". The file computes
            correctly in all of them.
        precision: the arithmetic of float32, "ieee" or "tf32", whatever PyTorch's setting. By
            default that setting decides at each call.

    Returns:
        The text of the file.

    Raises:
        fastconv.ExportError: the convolution cannot be exported; the message says why.

    Examples:
        >>> text = fastconv.export(shape="2x3x16x16 8x3x3x3 padding=1", output="model.py")
        >>> "class ModelNew" in text
        True
    """
    # Imported here, because `import fastconv` does not need the planner.
    from fastconv.exporter import file, subject

    if precision not in (None, *get_args(Precision)):
        raise ExportError(f"precision should be 'ieee' or 'tf32', but got {precision!r}")
    path = None if output is None else Path(output)
    try:
        files.check_outputs([path], [reference])
        chosen = subject.choose(workload, shape, reference, attribute)
        text = file.compose(chosen, dtypes, precision)
        if path is not None:
            files.write(path, text)
    except files.FileError as error:
        raise ExportError(str(error)) from error
    return text
