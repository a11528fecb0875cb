# SPDX-License-Identifier: Apache-2.0
"""`flashrl check`: looks for what would stop a run, on this machine or on every node of a Ray cluster.

`machine` looks at versions, memory and the plugins, `arithmetic` computes with our kernels, `cluster` has every node do
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from flashrl_verl.errors import FlashRLError
from flashrl_verl.upstream.versions import INSTALL_COMMAND

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    """An error stops a run, or makes it sample from something else than it says."""
    subject: str
    text: str
    """What was seen; includes the remedy where ``remedy`` is empty and the level is not ok."""
    remedy: str = ""


def guarded(
    subject: str, check: Callable[..., Iterable[Finding]], *arguments: Any, refused: Level = "error"
) -> Iterator[Finding]:
    """Yield what a check finds. An exception in it is one more error, and other checks follow; a ``FlashRLError`` is of
    the level ``refused``."""
    try:
        yield from check(*arguments)
    except FlashRLError as raised:
        yield Finding(refused, subject, str(raised))  # the remedy is in it
    except Exception as raised:  # noqa: BLE001 - whatever a broken machine raises is a finding
        remedy = f"what it names; else tested versions: {INSTALL_COMMAND}"
        yield Finding("error", subject, f"{type(raised).__name__}: {raised}", remedy)
