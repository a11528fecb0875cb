# SPDX-License-Identifier: Apache-2.0
"""The scripts a user runs: what they refuse and start, an installation that is resumed; a launch script starts
here or through a Ray dashboard, and leaves nothing behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP_ENV = ROOT / "scripts" / "setup_env.sh"
RECIPE = ROOT / "recipe" / "flashrl"
EXPERIMENT = "dapo_qwen2.5_32b_int8"
SNAPSHOT = Path(__file__).parent / "snapshots" / f"{EXPERIMENT}.txt"
"""Its difference to verl's defaults; FLASHRL_UPDATE_SNAPSHOTS=1 writes it anew."""
WITHOUT_A_SCRIPT = {"base", "quickstart", "smoke"}
"""What others are made of, and the toy runs: `flashrl quickstart` starts those."""


def bash(script: Path, *words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """Run a script with this interpreter first on PATH and without Ray's variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # abspath, not resolve: the interpreter of a virtual environment is a link out of it.
    environment["PATH"] = os.pathsep.join([os.path.dirname(os.path.abspath(sys.executable)), os.environ["PATH"]])
    environment |= {"PYTHONPATH": str(ROOT), **variables}
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


def test_a_relative_output_of_the_quickstart_starts_where_the_caller_is(tmp_path):
    (tmp_path / "taken").write_text("mine")
    process = bash(ROOT / "scripts" / "quickstart.sh", "--output", "taken", cwd=tmp_path, FLASHRL_SKIP_SETUP="1")
    assert process.returncode == 1 and f"FileExistsError: [Errno 17] File exists: '{tmp_path}/taken'" in process.stderr


# ---- set-up with a Python that installs nothing ----

# It answers the questions about its version, makes an environment that holds itself, and runs a file of the test for
# pip.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-c import platform"*) echo 3.11.9 ;;
  "-m venv "*)
    mkdir -p "${{!#}}/bin" "${{!#}}/lib/python3.11/site-packages"
    cp "$0" "${{!#}}/bin/python" && cp "$0" "${{!#}}/bin/flashrl" ;;
  "-m pip "*) echo "$*" >>{folder}/asked && source {folder}/pip ;;
  -) cat >/dev/null ;;
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


# ---- launch scripts ----


def test_a_dry_run_of_a_copied_recipe_prints_the_difference_and_starts_and_leaves_nothing(tmp_path):
    fork, cwd = tmp_path / "fork" / "recipe" / "flashrl", tmp_path / "elsewhere"
    shutil.copytree(RECIPE, fork, ignore=shutil.ignore_patterns("__pycache__"))
    cwd.mkdir()
    before = set(fork.rglob("*"))
    done = bash(fork / f"run_{EXPERIMENT}.sh", "--dry-run", cwd=cwd)
    assert done.returncode == 0, done.stderr
    _, _, difference = done.stdout.partition("# Difference to verl's defaults")
    told = difference.partition("\n")[2].partition("\n\n")[0] + "\n"
    if os.environ.get("FLASHRL_UPDATE_SNAPSHOTS") == "1":
        SNAPSHOT.write_text(told)
    assert told == SNAPSHOT.read_text(), "if this is meant, run again with FLASHRL_UPDATE_SNAPSHOTS=1"
    said = "\nRollout: INT8 weights, rotated, INT8 KV cache. Correction: a weight a token, TIS, C = 8.0.\n"
    assert said in done.stdout
    assert done.stdout.endswith("is valid, but for what is not here (2). Nothing was started.\n")
    assert "Started a local Ray instance" not in done.stdout + done.stderr
    assert {path for path in set(fork.rglob("*")) - before if "__pycache__" not in path.parts} == set()
    assert list(cwd.iterdir()) == []


@pytest.fixture
def ray_command(tmp_path):
    """A `ray` command that writes down its words instead of submitting: the script is tested, not Ray."""
    command = tmp_path / "bin" / "ray"
    command.parent.mkdir()
    command.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "$@"\n')
    command.chmod(0o755)
    return {"PATH": os.pathsep.join([str(command.parent), os.environ["PATH"]])}


def test_every_experiment_has_a_script_that_submits_it_with_the_words_unchanged(tmp_path, ray_command):
    experiments = {path.stem for path in (ROOT / "flashrl_verl" / "configs" / "experiment").glob("*.yaml")}
    assert {path.stem.removeprefix("run_") for path in RECIPE.glob("run_*.sh")} == experiments - WITHOUT_A_SCRIPT
    words = ["data.train_files=/shared/a b.parquet", "trainer.logger=[console,wandb]"]
    for number, experiment in enumerate(sorted(experiments - WITHOUT_A_SCRIPT)):
        address = {("RAY_ADDRESS", "RAY_JOB_ADDRESS")[number % 2]: "http://head:8265"}
        script = RECIPE / f"run_{experiment}.sh"
        done = bash(script, *words, cwd=tmp_path, **ray_command, **address)
        assert done.returncode == 0 and os.access(script, os.X_OK), done.stderr
        assert done.stdout.splitlines() == [
            *[str(ROOT), "job", "submit", "--address", "http://head:8265", "--working-dir", ".", "--"],
            *["python3", "-m", "recipe.flashrl.main_flashrl", f"experiment={experiment}", *words],
        ]
