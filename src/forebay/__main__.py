"""`python -m forebay`: the command line without the console script."""

from __future__ import annotations

import sys

from forebay.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
