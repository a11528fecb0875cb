# SPDX-License-Identifier: Apache-2.0
"""Versions against those that were run, requirements of this package, and metadata against the code that is
imported."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from flashrl_verl.plugins.versions import (
    DISTRIBUTION,
    INSTALL_COMMAND,
    TESTED,
    TESTED_PYTHON,
    Component,
    Status,
    classify,
)
from flashrl_verl.tools.check.findings import Finding, fail, ok, warn

OPTIONAL = {"matplotlib": "the pictures of `flashrl report`"}
"""Requirements that a run does without, and what they are for: verl and vLLM bring all others."""


def copies(name: str, path: Sequence[str] | None = None) -> list[importlib.metadata.Distribution]:
    """All metadata of a distribution, in the order in which Python looks: the first one answers, the others are hidden
    by it.

    Args:
        name: of the distribution; case, ``-`` and ``_`` do not matter.
        path: folders to look in; None for ``sys.path``.

    Returns:
        One distribution for each pair of folder and version.
    """
    where = {} if path is None else {"path": list(path)}
    found: dict[tuple, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(name=name, **where):
        found.setdefault((place(distribution), distribution.version), distribution)
    return list(found.values())


def place(distribution: importlib.metadata.Distribution) -> Path:
    """The folder that holds a distribution's metadata, and usually its code."""
    return Path(str(distribution.locate_file("")))


def check_python(version: str) -> Iterator[Finding]:
    """Args: version: of Python, such as 3.11.9."""
    if ".".join(version.split(".")[:2]) in TESTED_PYTHON:
        yield ok("Python", version)
    else:
        tested = " or ".join(TESTED_PYTHON)
        yield warn(
            "Python", f"{version} has not been run (tested: {tested})", "FLASHRL_PYTHON=<python3.12> " + INSTALL_COMMAND
        )


def check_components(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Compare the metadata of verl, vLLM, torch, ... with what was run, and with itself.

    Args:
        path: folders to look in; None for ``sys.path``.
    """
    for name, component in TESTED.items():
        there = [distribution for alias in component.distributions for distribution in copies(alias, path)]
        if not there and (checkout := code_of(component.module, path)):
            text = f"code without metadata in {checkout}, so of no known version (tested: {_tested(component)})"
            yield warn(name, text, "pip install --no-deps -e <checkout> gives it a version (docs/forks.md)")
            continue
        version = there[0].version if there else None
        status = classify(component, version)
        if status is Status.MISSING:
            yield fail(name, f"not installed (tested: {_tested(component)})", INSTALL_COMMAND)
        elif two := _two_versions(component, path):
            yield two
        elif status is Status.UNTESTED:
            text = f"{version} has not been run with this release (tested: {_tested(component)})"
            yield warn(name, text, f"if anything looks wrong, a tested version: {INSTALL_COMMAND}; docs/upgrading.md")
        else:
            yield ok(name, str(version))


def code_of(module: str, path: Sequence[str] | None = None) -> str | None:
    """The file by which a module would be imported, such as a fork's on PYTHONPATH; None where there is none.

    Args:
        module: on the first level; it is not imported.
        path: folders to look in; None for ``sys.path``.
    """
    spec = importlib.machinery.PathFinder.find_spec(module, path)
    return spec.origin if spec else None  # a folder without __init__.py that happens to have the name has no origin


def _tested(component: Component) -> str:
    return " or ".join(component.tested)


def _two_versions(component: Component, path: Sequence[str] | None) -> Finding | None:
    """One name installed twice in two versions: pip, verl and vLLM then speak of different code."""
    for name in component.distributions:
        there = copies(name, path)
        if len({distribution.version for distribution in there}) > 1:
            listed = ", ".join(f"{distribution.version} in {place(distribution)}" for distribution in there)
            remove = (
                "remove those that are not meant: PYTHONPATH, or a left-over folder "
                f"{_folder(name)}-<version>.dist-info"
            )
            return fail(component.module, f"metadata of several versions, the first one answers: {listed}", remove)
    return None


def _folder(name: str) -> str:
    return name.replace("-", "_")


def check_requirements(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """What this package needs beside verl and vLLM, by its own metadata.

    Args:
        path: folders to look in; None for ``sys.path``.
    """
    ours = copies(DISTRIBUTION, path)
    needed = [Requirement(line) for line in (ours[0].requires or [] if ours else [])]
    needed = [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    found = {r.name: copies(r.name, path) for r in needed}
    missing = [r for r in needed if not found[r.name]]
    other = [
        r for r in needed if found[r.name] and not r.specifier.contains(found[r.name][0].version, prereleases=True)
    ]
    for requirement in missing:
        command = f"pip install '{requirement}'"
        if purpose := OPTIONAL.get(requirement.name):
            yield warn("requirements", f"{requirement.name} is missing, needed for {purpose}", command)
        else:
            yield fail("requirements", f"{requirement} is missing", command)
    for requirement in other:
        text = f"{requirement.name} {found[requirement.name][0].version} is installed, {requirement} is wanted"
        yield warn("requirements", text, f"pip install '{requirement}', if verl and vLLM allow it")
    if needed and not missing and not other:
        yield ok("requirements", f"{len(needed)} of {DISTRIBUTION}, all installed")


def check_imported(imported: Mapping[str, str], path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Compare what modules say of themselves with what their metadata says of them.

    Args:
        imported: module of ``TESTED`` -> its ``__version__`` in the process that imported it.
        path: folders of the metadata; None for ``sys.path``.
    """
    differ = []
    for module, version in imported.items():
        there = [d for alias in TESTED[module].distributions for d in copies(alias, path)]
        if there and public(there[0].version) != public(version):
            differ.append(f"{module} is {version}, its metadata in {place(there[0])} says {there[0].version}")
    if differ:
        remedy = f"remove that metadata (PYTHONPATH, or a left-over dist-info), or install again: {INSTALL_COMMAND}"
        yield fail("imported versions", "; ".join(differ), remedy)
    else:
        yield ok("imported versions", f"{', '.join(imported)} are what their metadata says")


def public(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:  # a fork may call itself anything
        return version
