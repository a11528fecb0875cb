# SPDX-License-Identifier: Apache-2.0
"""The launch scripts start what their words say, here or through a Ray dashboard, and leave nothing behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipe" / "flashrl"
SNAPSHOTS = Path(__file__).with_name("snapshots")
EXPERIMENT = "dapo_qwen2.5_32b_int8"
WITHOUT_A_SCRIPT = {"base", "quickstart", "smoke"}
"""What others are made of, and the toy runs: `flashrl quickstart` starts those."""


def run(recipe: Path, *words: str, cwd: Path, experiment: str = EXPERIMENT, **variables: str):
    """Run a script with this interpreter first on PATH and without Ray's variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # abspath, not resolve: the interpreter of a virtual environment is a link out of it.
    environment["PATH"] = os.pathsep.join([os.path.dirname(os.path.abspath(sys.executable)), os.environ["PATH"]])
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = ["bash", str(recipe / f"run_{experiment}.sh"), *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_a_dry_run_of_a_copied_recipe_prints_the_difference_and_starts_and_leaves_nothing(tmp_path):
    fork, cwd = tmp_path / "fork" / "recipe" / "flashrl", tmp_path / "elsewhere"
    shutil.copytree(RECIPE, fork, ignore=shutil.ignore_patterns("__pycache__"))
    cwd.mkdir()
    before = set(fork.rglob("*"))
    done = run(fork, "--dry-run", cwd=cwd)
    assert done.returncode == 0, done.stderr
    _, _, difference = done.stdout.partition("# Difference to verl's defaults")
    assert difference.partition("\n")[2].startswith((SNAPSHOTS / f"{EXPERIMENT}.txt").read_text())
    assert done.stdout.rstrip().endswith("The configuration is valid. Nothing was started.")
    assert "Started a local Ray instance" not in done.stdout + done.stderr
    assert {path for path in set(fork.rglob("*")) - before if "__pycache__" not in path.parts} == set()
    assert list(cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor_rollout_ref.rollout.top_p=0.9", "ConfigError: actor_rollout_ref.rollout.top_p=0.9 is refused"),
        ("trainer.n_gpus_pernode=4", "no key trainer.n_gpus_pernode. Remedy: trainer.n_gpus_per_node"),
    ],
)
def test_a_word_that_cannot_be_is_one_error(tmp_path, word, said):
    done = run(RECIPE, word, "trainer.nnodes=2", cwd=tmp_path)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ConfigError: ")


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
        done = run(RECIPE, *words, cwd=tmp_path, experiment=experiment, **ray_command, **address)
        assert done.returncode == 0 and os.access(RECIPE / f"run_{experiment}.sh", os.X_OK), done.stderr
        assert done.stdout.splitlines() == [
            *[str(ROOT), "job", "submit", "--address", "http://head:8265", "--working-dir", ".", "--"],
            *["python3", "-m", "recipe.flashrl.main_flashrl", f"experiment={experiment}", *words],
        ]
