# SPDX-License-Identifier: Apache-2.0
"""Versions of what runs, and where, as results and runs record them."""

import functools
import hashlib
import platform
from pathlib import Path

from flashrl_verl import __version__
from flashrl_verl.plugins.versions import check_versions

_DIGITS = 12
"""Of a SHA-256 in hexadecimal, which tells some machines or releases apart."""


def installed_versions() -> dict[str, str | None]:
    """Version of each tested component by its module's name; None of what is not installed. Imports none of them."""
    return {finding.component.module: finding.installed for finding in check_versions()}


def software() -> dict[str, str]:
    """The same in words, with this package and Python: what two results have to share to stand in one table."""
    versions = {name: str(version) for name, version in installed_versions().items()}
    return versions | {"flashrl_verl": __version__, "python": platform.python_version()}


@functools.cache
def package_digest(root: Path = Path(__file__).parents[3] / "flashrl_verl") -> str:
    """Of this package's modules: two results of one version need not be of one code.

    Args:
        root: the package's folder.
    """
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def machine_digest(boot: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """Of what Linux names a boot of this machine by, or of its name on the network: tells machines of one type apart.

    Args:
        boot: the file with that name.
    """
    name = boot.read_text() if boot.is_file() else platform.node()
    return hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
