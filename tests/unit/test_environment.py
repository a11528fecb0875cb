# SPDX-License-Identifier: Apache-2.0
"""A Python without the environment: every way in says what is missing and what to do, in one line, and hides nothing
else."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashrl_verl.errors import environment_needed

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = "recipe/flashrl/run_dapo_qwen2.5_32b_int8.sh"


@pytest.mark.parametrize(
    "command, missing, remedy",
    [
        (f"bash {ROOT}/{LAUNCH} --dry-run", "hydra", "bash scripts/setup_env.sh"),
        (f"bash {ROOT}/scripts/quickstart.sh", "typer", "bash scripts/setup_env.sh"),
        # A recipe that was copied, and the package was not installed.
        (f"bash {LAUNCH}", "flashrl_verl", "pip install --no-deps -e <flashrl-verl>"),
    ],
)
def test_without_the_environment_a_command_is_one_line_with_the_remedy(tmp_path, command, missing, remedy):
    """`python` is this interpreter without what is installed for it."""
    shutil.copytree(ROOT / "recipe", tmp_path / "recipe", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bin").mkdir()
    for path in (tmp_path / "bin" / "python", tmp_path / "bin" / "python3"):
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        path.chmod(0o755)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHON"))}
    env |= {"PATH": os.pathsep.join([f"{tmp_path}/bin", env["PATH"]]), "FLASHRL_SKIP_SETUP": "1"}
    done = subprocess.run(command.split(), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1 and done.stdout == ""
    [said] = done.stderr.splitlines()
    assert f"no module {missing!r}" in said and remedy in said


@pytest.mark.parametrize("name", ["flashrl_verl.no_such_module", "packaging.no_such_module"])
def test_a_module_that_the_environment_cannot_lack_is_raised(name):
    with pytest.raises(ModuleNotFoundError, match=name), environment_needed():
        importlib.import_module(name)
