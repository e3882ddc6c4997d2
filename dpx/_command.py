"""The command `dpx`. Its imports take seconds, during which an interrupt must end it cleanly."""

import os
import signal
import sys


def main(command: str = "") -> None:
    """Runs `dpx COMMAND`. The command is the first argument of the process unless it is given here."""
    # A KeyboardInterrupt would be lost or wrapped where it hits an import.
    signal.signal(signal.SIGINT, _leave)
    from dpx.runs import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if command:
        sys.argv = [sys.argv[0], command, *sys.argv[1:]]
    main.start()


def _leave(number, frame) -> None:
    del number, frame
    os.write(2, b"interrupted before anything began: repeat the command\n")
    os._exit(130)
