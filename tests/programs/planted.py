# SPDX-License-Identifier: Apache-2.0
"""Faults for `flashrl check`, planted where they would be: metadata on ``PYTHONPATH``."""

from collections.abc import Mapping
from pathlib import Path


def metadata(folder: Path, name: str, version: str, points: Mapping[str, str] | None = None) -> Path:
    """Write a dist-info folder as pip leaves it, without the code.

    Args:
        folder: where it lies; a place for ``PYTHONPATH``.
        name: of the distribution, and of its entry points.
        version: that it claims.
        points: group -> value of entry points.

    Returns:
        ``folder``.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("".join(f"[{g}]\n{name} = {v}\n" for g, v in (points or {}).items()))
    return folder
