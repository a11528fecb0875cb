# SPDX-License-Identifier: Apache-2.0
"""What a person needs of a failed run's log."""

import re
from pathlib import Path

from rich.markup import escape

from flashrl_verl.errors import FlashRLError

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^(?:\((?:[^\s()]+ )*pid=\d+(?:, ip=\S+)?\) ?)+(?:ERROR \d\d-\d\d \S+ \[\S+\] )?")
"""Who said it, by Ray (`(WorkerDict pid=5399) `, also nested), and when, by vLLM."""
_NAMES = "|".join(error.__name__ for error in (FlashRLError, *FlashRLError.__subclasses__()))
_OURS = re.compile(rf"^(?:flashrl_verl\.errors\.)?(?:{_NAMES}): \S")
_CONSEQUENCE = re.compile(r"root cause|EngineDeadError|(Actor|Worker)\w*DiedError")
"""vLLM's and Ray's errors that only say that another process failed."""
_ANY = re.compile(r"^(?!ray\.exceptions\.)(?:\w+\.)*\w*(?:Error|Exception|Killed|Exit): \S")
_LOG = re.compile(
    r"Traceback|ray\.exceptions|\[|INFO|WARNING|ERROR|DEBUG|Set the environment variable HYDRA|  File |\d{4}-\d\d"
)


def last_error(log: str) -> list[str]:
    """What a person needs of a failed run's log: the exception's message without traceback and prefixes.

    FlashRL's own errors come first: what follows them is only their consequence in other processes.
    """
    lines = [_PREFIX.sub("", _COLOURS.sub("", line)).rstrip() for line in log.splitlines()]
    for pattern in (_OURS, _ANY):
        found = [i for i, line in enumerate(lines) if pattern.match(line)]
        if found:
            start = next((i for i in reversed(found) if not _CONSEQUENCE.search(lines[i])), found[-1])
            more = lines[start + 1 : start + 6]
            ends = (i for i, line in enumerate(more) if not line or _ANY.match(line) or _LOG.match(line))
            return [lines[start], *more[: next(ends, len(more))]]
    return [line for line in lines if line][-10:]


def last_line(log: Path) -> str:
    """The last whole line of a log that is being written, without prefix, as Rich shows it; empty before."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    text = next((line for line in reversed(lines) if line.endswith("\n") and line.strip()), "")
    return escape(_PREFIX.sub("", _COLOURS.sub("", text)).strip())
