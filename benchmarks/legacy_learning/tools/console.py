# SPDX-License-Identifier: Apache-2.0
"""The console that commands print to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = 160
"""Of output that goes to a file or a pipe, where rich assumes 80, which breaks tables and lines."""


def new_console() -> Console:
    """As wide as the terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_COLUMNS)
