# SPDX-License-Identifier: Apache-2.0
"""The launch scripts start what their words say, here or through a Ray dashboard, and leave nothing behind.

They share ``launch.sh``, so that what it does is tested with one of them, and of the others what they can differ in.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipe" / "flashrl"
SNAPSHOTS = Path(__file__).with_name("snapshots")
SCRIPTS = sorted(path.stem.removeprefix("run_") for path in RECIPE.glob("run_*.sh"))
"""Experiments by the names of their scripts."""
EXPERIMENT = "dapo_qwen2.5_32b_int8"
OTHERS = [name for name in SCRIPTS if name != EXPERIMENT]
WITHOUT_A_SCRIPT = {"base", "quickstart", "smoke", "chain"}
"""What others are made of, and the toy runs: `flashrl quickstart` starts those."""


def _run(recipe, *words, cwd, experiment=EXPERIMENT, **variables):
    """Run a script with this interpreter first on PATH and without Ray's variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # abspath, not resolve: the interpreter of a virtual environment is a link out of it.
    environment["PATH"] = os.pathsep.join([os.path.dirname(os.path.abspath(sys.executable)), os.environ["PATH"]])
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = ["bash", str(recipe / f"run_{experiment}.sh"), *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def _files(directory):
    return {path for path in directory.rglob("*") if "__pycache__" not in path.parts and ".git" not in path.parts}


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A stand-in for a fork of verl with a copy of the recipe: nothing else of this repository is in it."""
    directory = tmp_path_factory.mktemp("fork")
    shutil.copytree(RECIPE, directory / "recipe" / "flashrl", ignore=shutil.ignore_patterns("__pycache__"))
    return directory


@pytest.fixture(scope="module")
def dry_run(fork, tmp_path_factory):
    """One dry run of the copied recipe, started from an empty directory elsewhere."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    before = _files(fork)
    done = _run(fork / "recipe" / "flashrl", "--dry-run", cwd=cwd)
    return done, _files(fork) - before, _files(cwd)


def test_dry_run_of_a_copied_recipe_succeeds_and_says_so(dry_run):
    done, _, _ = dry_run
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("The configuration is valid. Nothing was started.")


def test_dry_run_prints_the_resolved_configuration_then_the_difference(dry_run):
    done, _, _ = dry_run
    resolved, _, difference = done.stdout.partition("# Difference to verl's defaults")
    assert "rollout_is_threshold: 8.0" in resolved and "${" not in resolved
    assert difference.partition("\n")[2].startswith((SNAPSHOTS / f"{EXPERIMENT}.txt").read_text())


def test_dry_run_leaves_no_file_behind(dry_run):
    _, in_recipe, in_cwd = dry_run
    assert in_recipe == set() and in_cwd == set()


def test_dry_run_starts_neither_ray_nor_a_platform(dry_run):
    done, _, _ = dry_run
    for word in ("Started a local Ray instance", "No supported accelerator", "Traceback"):
        assert word not in done.stdout + done.stderr


def test_contradiction_on_the_command_line_is_one_line_and_a_failure(tmp_path):
    words = ["actor_rollout_ref.rollout.top_p=0.9", "trainer.nnodes=2"]
    done = _run(RECIPE, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "ConfigError: actor_rollout_ref.rollout.top_p=0.9 is refused" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def ray_command(tmp_path):
    """A `ray` command that writes down its words instead of submitting: the script is tested, not Ray."""
    directory = tmp_path / "bin"
    directory.mkdir()
    command = directory / "ray"
    command.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "$@"\n')
    command.chmod(0o755)
    return {"PATH": os.pathsep.join([str(directory), os.environ["PATH"]])}


@pytest.mark.parametrize("variable", ["RAY_JOB_ADDRESS", "RAY_ADDRESS"])
def test_dashboard_address_submits_the_words_unchanged(tmp_path, ray_command, variable):
    words = ["data.train_files=/shared/a b.parquet", "trainer.logger=[console,wandb]"]
    done = _run(RECIPE, *words, cwd=tmp_path, **ray_command, **{variable: "http://head:8265"})
    assert done.returncode == 0, done.stderr
    cwd, *command = done.stdout.splitlines()
    assert Path(cwd) == ROOT
    assert command == [
        *["job", "submit", "--address", "http://head:8265", "--working-dir", ".", "--"],
        *["python3", "-m", "recipe.flashrl.main_flashrl", f"experiment={EXPERIMENT}"],
        *words,
    ]


def test_a_misspelt_key_is_named_by_hydra(tmp_path):
    done = _run(RECIPE, "correction=icepop", "trainer.n_gpus_pernode=4", "trainer.nnodes=2", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert "Could not override 'trainer.n_gpus_pernode'" in done.stderr and "Traceback" not in done.stderr


def _code(script):
    return [line for line in script.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("experiment", SCRIPTS)
def test_script_is_its_experiment_and_nothing_else(experiment):
    script = RECIPE / f"run_{experiment}.sh"
    assert os.access(script, os.X_OK) and script.read_text().startswith("#!/usr/bin/env bash\n")
    assert _code(script) == [
        "set -euo pipefail",
        'source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"',
        f'launch {experiment} "$@"',
    ]
    for word in re.findall(r"[\w./]*run_[\w.]+\.sh|[\w./]+\.yaml", script.read_text()):  # what its comments point at
        assert word in (f"recipe/flashrl/run_{experiment}.sh", f"flashrl_verl/configs/experiment/{experiment}.yaml")


def test_what_the_scripts_share_hands_no_setting_through_the_environment():
    code = "\n".join(_code(RECIPE / "launch.sh"))
    assert "export" not in code
    assert set(re.findall(r"\$\{?([A-Z][A-Z0-9_]*)", code)) == {"BASH_SOURCE", "RAY_JOB_ADDRESS", "RAY_ADDRESS"}


def test_every_experiment_has_its_script():
    experiments = {path.stem for path in (ROOT / "flashrl_verl" / "configs" / "experiment").glob("*.yaml")}
    assert set(SCRIPTS) == experiments - WITHOUT_A_SCRIPT


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory):
    """A dry run of every other script, two at a time: each takes seconds, most of them for imports."""
    cwd = tmp_path_factory.mktemp("dry_runs")
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(_run, RECIPE, "--dry-run", cwd=cwd, experiment=name) for name in OTHERS}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", OTHERS)
def test_every_script_dry_runs_its_experiment(dry_runs, experiment):
    done = dry_runs[experiment].result()
    assert done.returncode == 0, done.stderr
    _, _, difference = done.stdout.partition("# Difference to verl's defaults")
    assert difference.partition("\n")[2].startswith((SNAPSHOTS / f"{experiment}.txt").read_text())
    assert done.stdout.rstrip().endswith("The configuration is valid. Nothing was started.")


def test_recipe_has_no_package_file():
    """TransferQueue and verl bring a top-level `recipe` too: as namespace packages they live side by side."""
    assert not (ROOT / "recipe" / "__init__.py").exists()
    assert not (RECIPE / "__init__.py").exists()
