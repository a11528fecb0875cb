# SPDX-License-Identifier: Apache-2.0
"""Faults for `flashrl check`, planted where they would be: metadata on the path, modules that raise, small file
systems."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import flashrl_verl
from flashrl_verl.plugins.versions import DISTRIBUTION, TESTED

POINTS = {"verl.plugins": "flashrl_verl.plugins.verl", "vllm.general_plugins": "flashrl_verl.plugins.vllm:register"}
"""This package's entry points, by group."""


def metadata(
    folder: Path,
    name: str,
    version: str,
    *,
    points: Mapping[str, str] | None = None,
    point: str = "flashrl",
    requires: Sequence[str] = (),
    files: Sequence[str] = (),
    editable: Path | None = None,
) -> Path:
    """Write a dist-info folder as pip leaves it, without the code.

    Args:
        folder: where it lies; a place for ``PYTHONPATH``.
        name: of the distribution.
        version: that it claims.
        points: group -> value of entry points.
        point: their name.
        requires: requirements.
        files: what its RECORD lists.
        editable: the checkout of an editable installation.

    Returns:
        ``folder``.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    needed = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    (info / "entry_points.txt").write_text(
        "".join(f"[{g}]\n{point} = {value}\n" for g, value in (points or {}).items())
    )
    if editable:
        (info / "direct_url.json").write_text(json.dumps({"url": editable.as_uri(), "dir_info": {"editable": True}}))
    return folder


def healthy(folder: Path) -> Path:
    """Metadata of everything that was tested, as after a good installation; returns ``folder``."""
    for component in TESTED.values():
        metadata(folder, component.distributions[0], component.tested[0])
    return metadata(folder, DISTRIBUTION, flashrl_verl.__version__, points=POINTS)


def module(folder: Path, name: str, text: str) -> Path:
    """Write a module; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return folder


def with_small(folder: Path, megabytes: int, words: Sequence[str], fill: int = 0) -> list[str]:
    """A command in a view of the file system of its own, where ``folder`` is that small (needs
    ``local_cluster.can_hide``).

    Args:
        folder: to be small.
        megabytes: its size, MiB.
        words: the command.
        fill: MiB that are taken already.
    """
    path = shlex.quote(str(folder))
    prepare = f"mount -t tmpfs -o size={megabytes}m tmpfs {path}"
    if fill:
        prepare += f" && head -c {fill}M /dev/zero > {path}/taken"
    return ["unshare", "--mount", "sh", "-c", f'{prepare} && exec "$@"', "sh", *words]


def told(module_name: str, call: str) -> list[str]:
    """A command that prints, as JSON, the findings of a call below ``flashrl_verl.tools.check``."""
    program = (
        f"import json, os, pathlib; from flashrl_verl.tools.check import {module_name}\n"
        f"print(json.dumps([finding.to_dict() for finding in {module_name}.{call}]))"
    )
    return [sys.executable, "-c", program]
