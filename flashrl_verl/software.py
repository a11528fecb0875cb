# SPDX-License-Identifier: Apache-2.0
"""Versions of what runs, as results and runs record them."""

import platform

from flashrl_verl import __version__
from flashrl_verl.compat import check_versions


def installed_versions() -> dict[str, str | None]:
    """Version of each tested component by its module's name; None of what is not installed. Imports none of them."""
    return {finding.component.module: finding.installed for finding in check_versions()}


def software() -> dict[str, str]:
    """The same in words, with this package and Python: what two results have to share to stand in one table."""
    versions = {name: str(version) for name, version in installed_versions().items()}
    return versions | {"flashrl_verl": __version__, "python": platform.python_version()}
