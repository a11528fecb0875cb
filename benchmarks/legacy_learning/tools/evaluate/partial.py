# SPDX-License-Identifier: Apache-2.0
"""The responses of one precision while they are generated: a line each, in the order in which they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PARTIAL = "responses.partial"
"""Name of the file, in the precision's folder."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """What was sampled."""

    token_ids: list[int]
    truncated: bool
    """Whether it ended at the longest length."""


def read(path: Path) -> dict[int, Response]:
    """Responses by the number of their request; none where there is no file. What a stop cut off in the middle is left
    out.

    Raises:
        ValueError, TypeError: a line is something else.
    """
    found = {}
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        if line.endswith(b"\n"):
            number, token_ids, truncated = json.loads(line)
            if not isinstance(token_ids, list):
                raise TypeError(f"a {type(token_ids).__name__} instead of a response's tokens")
            found[number] = Response(token_ids=token_ids, truncated=truncated)
    return found


@contextmanager
def kept_in(path: Path) -> Iterator[Callable[[int, Response], None]]:
    """Open the file to keep more; a line that was cut off is taken out.

    Yields:
        What keeps a response, by the number of its request.

    Raises:
        OSError: no space, no rights, ...
    """
    with path.open("ab+") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)

        def keep(number: int, response: Response) -> None:
            line = json.dumps([number, response.token_ids, response.truncated], separators=(",", ":"))
            stream.write(f"{line}\n".encode())
            stream.flush()  # to the system, which writes it down even if this process is killed

        yield keep
