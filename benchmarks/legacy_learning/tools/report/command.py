# SPDX-License-Identifier: Apache-2.0
"""A recorded command as a reader wants it: a line a setting, and still to be pasted into a shell."""

from __future__ import annotations

import re
import shlex

_OVERRIDE = re.compile(r"~[\w.@/-]+(=.*)?|(\+{1,2})?[\w.@/:-]+=.*", re.DOTALL)
"""A word of Hydra's: ``key=value``, ``+key=value``, ``++key=value``, ``~key``."""


def broken_at_overrides(command: str) -> str:
    """The command over several lines, a continuation (``\\``) before every override; a shell takes it as it took the
    one line.

    Args:
        command: words joined by `shlex.join`. Anything else (pipes, assignments before the program, ...) comes back as
            it is: quoting its words again would change what it does.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    if not words or shlex.join(words) != command:
        return command
    lines = [[words[0]]]
    for word in words[1:]:
        if _OVERRIDE.fullmatch(word):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(" ".join(map(_quoted, line)) for line in lines)


def _quoted(word: str) -> str:
    """As `shlex.quote`, but double quotes around Hydra's single ones: `shlex.quote` writes each of those as
    ``'"'"'``."""
    if "'" in word and not set(word) & set('"$`\\!\n'):
        return f'"{word}"'
    return shlex.quote(word)
