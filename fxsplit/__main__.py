"""``python -m fxsplit``, also installed as ``fxsplit``: see `fxsplit.command`."""

from __future__ import annotations

import sys

from .command.commands import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
