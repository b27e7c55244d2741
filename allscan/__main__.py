"""``python -m allscan``: the commands of allscan.tools.doctor."""

import os
import signal
import sys

from .tools import doctor


def main() -> int:
    """Run a command; returns its exit status, or a shell's for SIGPIPE if the reader of the output closes it early."""
    try:
        try:
            return doctor.main()
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's flush at its exit
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
