"""``fastconv export``: writes or prints one Python file with a convolution and its kernels."""

from __future__ import annotations

from argparse import Namespace

from fastconv.exporter import export


def run(arguments: Namespace) -> int:
    """Exports what the arguments select, to ``--output`` or to stdout."""
    text = export(
        arguments.workload,
        shape=arguments.shape,
        reference=arguments.reference,
        output=arguments.output,
        attribute=arguments.attribute,
        dtypes=arguments.dtype,
        precision=arguments.precision,
    )
    if arguments.output is None:
        print(text, end="")
    return 0
