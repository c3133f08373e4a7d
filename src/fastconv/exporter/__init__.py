"""Writes one Python file with a convolution and all of its kernels: ``fastconv export``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastconv import files
from fastconv.exporter.common import DTYPES, ExportError

__all__ = ["DTYPES", "ExportError", "export"]


def export(
    workload: str | None = None,
    *,
    shape: str | None = None,
    reference: str | Path | None = None,
    output: str | Path | None = None,
    attribute: str | None = "conv2d",
    dtypes: Sequence[str] = ("float32",),
) -> str:
    """The text of one Python file whose ``ModelNew`` convolves with kernels of its own.

    The file needs only PyTorch (2.0.1 or newer) and nvcc. It is tuned for what is exported, on
    GPUs since Ampere, and right for every other geometry, and since Volta: ``docs/export.md``.

    Args:
        workload: the name of one of the bench's workloads, "dilated5x9" say.
        shape: instead, a shape as ``fastconv bench`` takes it.
        reference: instead, a Python file with a class ``Model``, and functions ``get_init_inputs``
            and ``get_inputs`` with its arguments and those of its ``forward``. It is executed.
            ``ModelNew`` is its ``Model`` with every ``nn.Conv2d`` replaced.
        output: where to write the file as well.
        attribute: under which name ``ModelNew`` holds its convolution (and its state dict the
            parameters); None: it is the convolution itself. Has no effect on a reference's model.
        dtypes: of "float32", "float16" and "bfloat16", those to be tuned for; all are right.

    Raises:
        ExportError: it cannot be exported, for the reason given.

        >>> fastconv.export("dilated5x9", output="model.py")
    """
    # Planning is no part of convolving: `import fastconv` does without.
    from fastconv.exporter import file, subject

    path = None if output is None else Path(output)
    try:
        files.check_outputs([path], [reference])
        chosen = subject.choose(workload, shape, reference, attribute)
        text = file.compose(chosen, dtypes)
        if path is not None:
            files.write(path, text)
    except files.FileError as error:
        raise ExportError(str(error)) from error
    return text
