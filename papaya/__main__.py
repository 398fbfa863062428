"""`python -m papaya`: the command of the same name, where its script is not on the path."""

from __future__ import annotations

import sys

from papaya.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
