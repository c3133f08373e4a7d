"""Where the ``fastconv`` command begins: beside the package, which imports PyTorch.

That takes a second or more, in which nothing is done yet. Ctrl-C then ends the process at once, as
it ends any program, rather than with a traceback from wherever the import is. The same goes for
the time that Python takes to end, when all is said.
"""

import signal
import sys


def main() -> int:
    """Runs the command; its exit status."""
    handler = signal.getsignal(signal.SIGINT)
    catches = handler is signal.default_int_handler  # unless it is ignored, as under nohup
    if catches:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fastconv.cli import main as run

    if catches:
        signal.signal(signal.SIGINT, handler)
    try:
        return run()
    finally:
        if catches:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
