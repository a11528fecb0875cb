# SPDX-License-Identifier: Apache-2.0
"""A Python without the environment: every way in says what is missing and what to do, in one line, and hides nothing
else."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from flashrl_verl.errors import MODULES, environment_needed

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipe" / "flashrl"
LAUNCH = "run_dapo_qwen2.5_32b_int8.sh"


@pytest.fixture
def bare(tmp_path):
    """Variables under which `python` and `python3` are this interpreter without what is installed for it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "python3"):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        (folder / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHON"))}
    return environment | {"PATH": os.pathsep.join([str(folder), os.environ["PATH"]]), "FLASHRL_SKIP_SETUP": "1"}


def _run(*command: object, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["bash", RECIPE / LAUNCH, "--dry-run"], "hydra"),
        (["bash", RECIPE / LAUNCH], "hydra"),
        (["python", ROOT / "scripts" / "prepare_data.py", "--help"], "typer"),
        (["bash", ROOT / "scripts" / "quickstart.sh"], "typer"),
    ],
)
def test_without_the_environment_a_command_is_one_line_with_the_remedy(tmp_path, bare, command, missing):
    done = _run(*command, cwd=tmp_path, env=bare)
    assert done.returncode == 1 and done.stdout == ""
    [said] = done.stderr.splitlines()
    assert f"no module {missing!r}" in said and "source .venv/bin/activate" in said
    assert "bash scripts/setup_env.sh" in said and "pip install --no-deps -e ." in said


def test_a_copied_recipe_without_the_package_says_what_to_install(tmp_path, bare):
    shutil.copytree(RECIPE, tmp_path / "recipe" / "flashrl", ignore=shutil.ignore_patterns("__pycache__"))
    done = _run("bash", tmp_path / "recipe" / "flashrl" / LAUNCH, cwd=tmp_path, env=bare)
    assert done.returncode == 1
    [said] = done.stderr.splitlines()
    assert "no module 'flashrl_verl'" in said and "pip install --no-deps -e <flashrl-verl>" in said


@pytest.mark.parametrize(
    ("there", "missing"), [(["hydra"], "omegaconf"), (["hydra", "omegaconf", "antlr4", "yaml"], "packaging")]
)
def test_an_environment_that_has_a_part_of_it_is_told_the_next(tmp_path, bare, there, missing):
    site = tmp_path / "site"
    site.mkdir()
    for name in there:
        (site / name).symlink_to(Path(find_spec(name).origin).parent)
    done = _run("bash", RECIPE / LAUNCH, cwd=tmp_path, env=bare | {"PYTHONPATH": str(site)})
    assert done.returncode == 1 and f"no module {missing!r}" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_module_of_this_package_that_is_missing_is_raised():
    with pytest.raises(ModuleNotFoundError, match="flashrl_verl.no_such_module"), environment_needed():
        import flashrl_verl.no_such_module  # noqa: F401


def test_a_part_of_a_package_that_is_there_is_raised():
    with pytest.raises(ModuleNotFoundError, match="packaging.no_such_module"), environment_needed():
        import packaging.no_such_module  # noqa: F401


def test_every_requirement_of_the_package_is_known_but_the_one_for_pictures():
    required = (ROOT / "setup.py").read_text().partition("INSTALL_REQUIRES = [")[2].partition("]")[0]
    names = {line.strip().strip('",').partition(">")[0] for line in required.splitlines() if line.strip()}
    modules = {{"hydra-core": "hydra", "pyzmq": "zmq"}.get(name, name) for name in names}
    assert modules - MODULES == {"matplotlib"}
