# SPDX-License-Identifier: Apache-2.0
"""A file that is written whole or not at all: whoever reads its name, after a stop too, finds the old content or the
new."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of which there is one writer at a time; its folder is there.

    Raises:
        OSError: no space, no rights, ...; what was there before is unchanged, after a stop in the middle too.
    """
    scratch = path.with_name(f".{path.name}.new")
    try:
        with scratch.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(scratch, path)
    except BaseException:  # Ctrl-C and SIGTERM (process_tree.Stopped) too
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
