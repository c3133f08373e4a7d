"""The ``fastconv`` command's start: it parses arguments before it imports the package and PyTorch.

The import takes a second or more. ``--help``, ``--version`` and wrong arguments do not wait for it,
since this package lies beside ``fastconv`` and imports nothing of it until the arguments are known.

Ctrl-C ends the process at once, as it ends any program, while nothing is done yet: during the
import, and while Python exits. In between, the command handles it.
"""

from __future__ import annotations

import signal

from _fastconv_command import parser, streams


def main() -> int:
    """Parses the arguments and runs the command; its exit status."""
    return streams.guard(_run)


def _run() -> int:
    handler = signal.getsignal(signal.SIGINT)
    catches = handler is signal.default_int_handler  # unless it is ignored, as under nohup
    if catches:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = parser.parse()
    from fastconv import cli

    if catches:
        signal.signal(signal.SIGINT, handler)
    try:
        return cli.run(arguments)
    finally:
        if catches:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
