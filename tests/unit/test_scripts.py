# SPDX-License-Identifier: Apache-2.0
"""The scripts a user runs: what they refuse, their help, an installation that is resumed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUP_ENV = ROOT / "scripts" / "setup_env.sh"


def bash(script: Path, *words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **variables}
    environment["PATH"] = os.pathsep.join([os.path.dirname(os.path.abspath(sys.executable)), os.environ["PATH"]])
    command = ["bash", script, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize(
    ("word", "variables", "said"),
    [
        ("--devise=cpu", {}, "'--devise=cpu'"),
        (None, {"FLASHRL_DEVICE": "tpu"}, "'tpu'"),
        (None, {"FLASHRL_DEVICE": "cpu", "FLASHRL_PYTHON": "{}/python3.9"}, "FLASHRL_PYTHON"),
        (None, {"FLASHRL_DEVICE": "cpu", "FLASHRL_VENV": "{}"}, "was not made by this script"),
    ],
)
def test_setup_refuses_before_it_makes_or_clears_anything(tmp_path, word, variables, said):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\necho 3.9.2\n")
    old.chmod(0o755)
    given = {"FLASHRL_VENV": "{}/venv", "FLASHRL_PYTHON": sys.executable, **variables}
    process = bash(SETUP_ENV, *filter(None, [word]), **{key: text.format(tmp_path) for key, text in given.items()})
    assert process.returncode == 1 and said in process.stderr
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.parametrize(
    ("script", "says"), [("setup_env.sh", "FLASHRL_DEVICE"), ("test.sh", "--slow"), ("quickstart.sh", "--resume")]
)
def test_a_script_explains_itself_and_makes_nothing(tmp_path, script, says):
    process = bash(ROOT / "scripts" / script, "--help", FLASHRL_VENV=str(tmp_path / "venv"))
    assert process.returncode == 0 and says in process.stdout and "set -euo" not in process.stdout
    assert not (tmp_path / "venv").exists()


def test_a_relative_output_of_the_quickstart_starts_where_the_caller_is(tmp_path):
    (tmp_path / "taken").write_text("mine")
    process = bash(ROOT / "scripts" / "quickstart.sh", "--output", "taken", cwd=tmp_path, FLASHRL_SKIP_SETUP="1")
    assert process.returncode == 1 and process.stderr.startswith(f"ConfigError: --output {tmp_path}/taken: ")


# ---- set-up with a Python that installs nothing ----

# It answers the questions about its version, makes an environment that holds itself, and runs a file of the test for
# pip.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-c import platform"*) echo 3.11.9 ;;
  "-m venv "*)
    mkdir -p "${{!#}}/bin" "${{!#}}/lib/python3.11/site-packages" && cp "$0" "${{!#}}/bin/python"
    [ ! -e {folder}/no-venv ] ;;
  "-m pip "*) echo "$*" >>{folder}/asked && source {folder}/pip ;;
  *) cat >/dev/null ;;
esac
"""


@pytest.fixture
def fake(tmp_path):
    """The variables for a set-up in tmp_path/venv; what stands in the file `pip` happens whenever pip is called."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(folder=tmp_path))
    python.chmod(0o755)
    (tmp_path / "pip").write_text("")
    return {"FLASHRL_PYTHON": str(python), "FLASHRL_VENV": str(tmp_path / "venv"), "FLASHRL_DEVICE": "cpu"}


def test_a_setup_that_fails_is_resumed_by_the_same_command_and_one_that_is_whole_is_used_again(tmp_path, fake):
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    (tmp_path / "no-venv").touch()
    assert "venv failed" in bash(SETUP_ENV, **fake).stderr
    (tmp_path / "no-venv").unlink()
    (tmp_path / "pip").write_text('case "$*" in *" -r "*) echo no space left; exit 1 ;; esac\n')
    failed = bash(SETUP_ENV, **fake)
    assert failed.returncode == 1 and "new environment" in failed.stdout  # the folder is still known for its own
    assert "no space left" in failed.stdout and "Rerun to resume" in failed.stderr.splitlines()[-1]

    (packages / "torch.py").write_text("large")
    (tmp_path / "pip").write_text("echo Collecting patience\n")
    resumed = bash(SETUP_ENV, **fake)
    assert resumed.returncode == 0 and f"resuming {tmp_path}/venv" in resumed.stdout and resumed.stderr == ""
    assert (packages / "torch.py").read_text() == "large"
    assert "Collecting patience\n" in resumed.stdout

    (tmp_path / "asked").unlink()
    again = bash(SETUP_ENV, **fake)
    assert again.returncode == 0 and f"ready: {tmp_path}/venv" in again.stdout and not (tmp_path / "asked").exists()
    other = bash(SETUP_ENV, **fake, FLASHRL_VLLM_WHEEL="vllm-1+cpu.whl")  # another lock: nothing of the old one stays
    assert other.returncode == 0 and "new environment" in other.stdout and not (packages / "torch.py").exists()
