"""`forebay` and `python -m forebay`: the command line; Ctrl-C is heard from the first import on.

A crash in native code, ours or a library's, shows on stderr where every thread was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from typing import Final

__all__ = ["run"]

# 128 and the number of SIGINT, as shells count.
_INTERRUPTED: Final = 130


def run() -> int:
    """Run the process's own words; returns the exit code."""
    with contextlib.suppress(RuntimeError, OSError):  # stderr may be closed, or no file
        faulthandler.enable()
    try:
        from forebay.cli.main import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("ended: SIGINT\n")
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
