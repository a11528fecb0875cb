# SPDX-License-Identifier: Apache-2.0
"""The responses of one precision while they are generated: a line each, in the order in which they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PARTIAL = "responses.partial"
"""Name of the file, in the precision's folder."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """What was sampled."""

    token_ids: list[int]
    truncated: bool
    """Whether it ended at the longest length."""


class Keep(Protocol):
    def __call__(self, number: int, response: Response) -> None:
        """Keep the response to a request, by the request's number."""


def read(path: Path) -> dict[int, Response]:
    """Responses by the number of their request; none where there is no file. What a stop cut off in the middle is left out."""
    found = {}
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        if line.endswith(b"\n"):
            number, token_ids, truncated = json.loads(line)
            found[number] = Response(token_ids=token_ids, truncated=truncated)
    return found


@contextmanager
def kept_in(path: Path) -> Iterator[Keep]:
    """Open the file to keep more; a line that was cut off is taken out.

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
