# SPDX-License-Identifier: Apache-2.0
"""Atomic writes: whoever reads the file, after a stop too, finds its old content or its new."""

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
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
