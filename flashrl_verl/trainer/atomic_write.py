# SPDX-License-Identifier: Apache-2.0
"""A file that is written whole or not at all: whoever reads its name, after a stop too, finds the old content or the
new."""

import contextlib
import os
from pathlib import Path


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk.

    Raises:
        OSError: no space, no rights, ...
    """
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def move(temporary: Path, path: Path) -> None:
    """Give a finished file its name, over what had it, and wait until the disk knows.

    Raises:
        OSError: no rights, ...
    """
    os.replace(temporary, path)
    with contextlib.suppress(OSError):  # the file is there; not every file system can wait for a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of which there is one writer at a time; its folder is there.

    Raises:
        OSError: no space, no rights, ...; what was there before is unchanged, after a stop in the middle too.
    """
    scratch = path.with_name(f".{path.name}.new")
    try:
        write_synced(scratch, content)
        move(scratch, path)
    except BaseException:  # Ctrl-C and SIGTERM (process_tree.Stopped) too
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise
