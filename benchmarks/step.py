"""`forebay bench step` from a checkout that is not installed.

    PYTHONPATH=src python benchmarks/step.py --size 3b --variants floor,none,r0,r50

See `forebay bench step --help`; the contestants are described in `forebay.bench.contestants`.
"""

from __future__ import annotations

import sys

from forebay.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "step", *sys.argv[1:]]))
