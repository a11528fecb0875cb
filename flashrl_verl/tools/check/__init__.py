# SPDX-License-Identifier: Apache-2.0
"""`flashrl check`: looks for what would stop a run, on this machine or on every node of a Ray cluster.

`machine` looks at versions, memory and network here, and starts fresh processes that load the plugins as verl and vLLM
do; `kernels` computes small layers there; `cluster` has every node do the same and compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from flashrl_verl.errors import FlashRLError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "warning", "error"]
    """An error stops a run, or makes it sample from something else than it says."""
    subject: str
    text: str
    """What was seen; includes the remedy where ``remedy`` is empty and the level is not ok."""
    remedy: str = ""
    node: str = ""
    """Where it was seen; empty for this machine."""


def ok(subject: str, text: str) -> Finding:
    return Finding(level="ok", subject=subject, text=text)


def warning(subject: str, text: str, remedy: str = "") -> Finding:
    return Finding(level="warning", subject=subject, text=text, remedy=remedy)


def error(subject: str, text: str, remedy: str = "") -> Finding:
    return Finding(level="error", subject=subject, text=text, remedy=remedy)


def guarded(subject: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> Iterator[Finding]:
    """Yield what a check finds; an exception in it is one more error, and other checks follow."""
    try:
        yield from check(*arguments)
    except FlashRLError as raised:
        yield error(subject, str(raised))  # the remedy is in it
    except Exception as raised:  # noqa: BLE001 - whatever a broken machine raises is a finding
        yield error(subject, f"{type(raised).__name__}: {raised}", "docs/troubleshooting.md")
