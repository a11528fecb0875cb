# SPDX-License-Identifier: Apache-2.0
"""What a check says: one finding a subject, with the remedy where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """How a subject was found."""

    OK = "ok"
    WARN = "warn"
    """A run may go well; the text says what may not."""
    FAIL = "fail"
    """A run would fail, or sample from something else than it says."""
    SKIPPED = "not checked"
    """Nobody looked; the text says why. Never counted as ok."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Raises:
        ValueError: a warning or a failure comes without a remedy.
    """

    name: str
    """The subject, a word or a few."""
    verdict: Verdict
    text: str
    """What was seen, one line."""
    remedy: str = ""
    """What to do about it; empty for ok and not checked."""
    node: str = ""
    """Where it was seen; empty for this machine."""

    def __post_init__(self):
        object.__setattr__(self, "verdict", Verdict(self.verdict))
        for field in ("text", "remedy"):
            object.__setattr__(self, field, " ".join(str(getattr(self, field)).split()))
        if self.verdict in (Verdict.WARN, Verdict.FAIL) and not self.remedy:
            raise ValueError(f"{self.name}: {self.verdict.value} without a remedy")

    def to_dict(self) -> dict[str, str]:
        return {**asdict(self), "verdict": self.verdict.value}


def ok(name: str, text: str) -> Finding:
    return Finding(name=name, verdict=Verdict.OK, text=text)


def warn(name: str, text: str, remedy: str) -> Finding:
    return Finding(name=name, verdict=Verdict.WARN, text=text, remedy=remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    return Finding(name=name, verdict=Verdict.FAIL, text=text, remedy=remedy)


def skipped(name: str, text: str) -> Finding:
    return Finding(name=name, verdict=Verdict.SKIPPED, text=text)


def guarded(name: str, check: Callable[..., Iterable[Finding]], *arguments: Any, **more: Any) -> Iterator[Finding]:
    """Yield what a check finds. Whatever it raises is a failure of its own, and the others go on.

    Args:
        name: subject of that failure.
        check: yields findings.
        *arguments, **more: its arguments.
    """
    try:
        yield from check(*arguments, **more)
    except Exception as error:  # noqa: BLE001 - a doctor reports, whatever it is
        yield fail(name, f"the check itself ended with {type(error).__name__}: {error}", remedy_of(error))


def remedy_of(error: Exception) -> str:
    """What to do about an exception that no check foresaw."""
    return (
        "the error says what this machine lacks; a message of this package contains its remedy"
        if type(error).__module__.startswith("flashrl_verl.")
        else "look for this error in docs/troubleshooting.md; report it with the versions above if it is not there"
    )


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing failed, else 1. Warnings and what was not checked are no failures."""
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """Verdict -> number of findings, in the order of ``Verdict``."""
    found = list(findings)
    return {verdict.value: sum(finding.verdict is verdict for finding in found) for verdict in Verdict}
