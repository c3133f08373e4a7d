"""``fastconv.export``: writes one Python file with a convolution and all of its kernels."""

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

    The file needs only PyTorch (2.0.1 or newer) and nvcc. It has tuned kernels for the exported
    convolutions on GPUs since Ampere, and portable kernels for all other geometries and for GPUs
    since Volta: see ``docs/export.md``. Give one of ``workload``, ``shape`` and ``reference``.

        >>> fastconv.export("dilated5x9", output="model.py")

    Args:
        workload: the name of one of the benchmark's workloads, for example "dilated5x9".
        shape: a shape as ``fastconv bench`` takes it.
        reference: a Python file with a class ``Model``, and functions ``get_init_inputs`` and
            ``get_inputs`` that return the arguments of its constructor and of its ``forward``. The
            file is executed. ``ModelNew`` is its ``Model`` with every ``nn.Conv2d`` replaced.
        output: the file to write; the text is returned in any case.
        attribute: the attribute of ``ModelNew`` that holds its convolution, which also names the
            parameters in the state dict. With None, ``ModelNew`` is the convolution itself. Has
            no effect on a reference's model.
        dtypes: the types to tune for, of "float32", "float16" and "bfloat16". The file computes
            correctly in all of them.

    Raises:
        ExportError: the convolution cannot be exported; the message says why.
    """
    # Imported here, because `import fastconv` does not need the planner.
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
