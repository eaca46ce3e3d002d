"""`forebay` and `python -m forebay`: the command line; Ctrl-C is heard from the first import on."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["run"]

# 128 and the number of SIGINT, as shells count.
_INTERRUPTED: Final = 130


def run() -> int:
    """Run the process's own words; returns the exit code."""
    try:
        from forebay.cli.main import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("ended: SIGINT\n")
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
