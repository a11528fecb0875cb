# SPDX-License-Identifier: Apache-2.0
"""The command line, and the quickstart's handling of overrides and directories."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart import progress, run
from flashrl_verl.quickstart.assets import MANIFEST, AssetsConfig
from flashrl_verl.quickstart.run import LATEST, QuickstartConfig, check, training_overrides
from flashrl_verl.tools.process_tree import ProcessTree
from flashrl_verl.tools.recipe_process import ROOT, compose, quoted

# ---- commands ----


def flashrl(*words: str, before: str = "pass") -> subprocess.CompletedProcess:
    code = f"import sys; {before}; from flashrl_verl.cli import main; sys.argv = ['flashrl', *{words!r}]; main()"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400)


def test_without_matplotlib_a_report_is_printed_and_its_pictures_are_one_line_with_the_remedy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": {"rollout_corr/k3_kl": 1e-4}}))
    done = flashrl("report", str(tmp_path), before="sys.modules['matplotlib'] = None")
    assert done.returncode == 1 and "1.0e-04" in done.stdout
    [said] = done.stderr.splitlines()
    assert said.startswith("FlashRLError: ") and "pip install 'matplotlib>=3.8'" in said


# ---- the quickstart, before anything is made ----


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--sede=3", "--sede=3"),
        ("precision", "'precision' is neither"),
        ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_p=0.9 is refused"),
        ("trainer.total_training_steps=null", "trainer.total_training_steps=None"),
        ("trainer.logger=[console]", "trainer.logger="),
        ("data.train_files=no/such.parquet", "data.train_files=no/such.parquet not found"),
        ("trainer.no_such_key=1", "trainer.no_such_key"),
        ("data.seed=1", "out holds a run already. Remedy: --resume"),
        ("--output={}/out/metrics.jsonl", "metrics.jsonl is a file"),
        ("--output={}/out/metrics.jsonl/folder", "metrics.jsonl is a file"),
    ],
)
def test_a_refused_word_leaves_every_earlier_run_where_it_is(tmp_path, monkeypatch, word, said):
    monkeypatch.setattr(run, "make_assets", None)  # or what is not refused would be trained
    for folder in ("out", "theirs/global_step_5"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "out" / "metrics.jsonl").write_text("old")
    words = ["quickstart", "--output", f"{tmp_path}/out", "hardware=cpu", word.format(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError) and said in str(result.exception)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["global_step_5", "metrics.jsonl", "out", "theirs"]


def test_checkpoints_of_another_run_are_not_overwritten(tmp_path):
    (tmp_path / "theirs" / "global_step_5").mkdir(parents=True)
    words = ("hardware=cpu", f"trainer.default_local_dir={tmp_path}/theirs")
    with pytest.raises(ConfigError, match="theirs holds a run already"):
        check(QuickstartConfig(output=tmp_path / "out", overrides=words))


def test_a_run_is_not_resumed_with_another_seed_or_past_its_end(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    latest = tmp_path / "checkpoints" / LATEST
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / MANIFEST).write_text(json.dumps({"recipe": AssetsConfig(seed=3).recipe(), "made": {}}))

    def resume(seed):
        return check(QuickstartConfig(output=tmp_path, seed=seed, resume=True, overrides=("hardware=cpu",)))[1]

    latest.write_text("10")
    assert resume(3).trainer.resume_mode == "auto"
    with pytest.raises(ConfigError, match="was not made with --seed 4"):
        resume(4)
    latest.write_text("28")
    with pytest.raises(ConfigError, match="is finished: its last checkpoint is of step 28 of 28"):
        resume(3)


@pytest.mark.parametrize("folder", ["/plain", "/two words/it's=1", "/a=b,c", "/[x]{y}"])
def test_the_users_overrides_win_and_any_path_can_be_one(folder):
    words = ("experiment=smoke", "hardware=cpu", "data.seed=9", f"trainer.project_name={quoted(folder)}")
    cfg = compose(training_overrides(QuickstartConfig(output=Path(folder), overrides=words)))
    assert cfg.trainer.device == "cpu" and cfg.data.seed == 9 and cfg.trainer.project_name == folder
    assert cfg.data.train_files == f"{folder}/assets/train.parquet"
    assert cfg.trainer.default_local_dir == f"{folder}/checkpoints"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor_rollout_ref.rolout.n=3", "no key actor_rollout_ref.rolout. Remedy: actor_rollout_ref.rollout"),
        ("corection=none", "no key corection. Remedy: correction"),
        ("trainer.x=1", "no key trainer.x. Remedy: --cfg job"),
        ("correction=tiss", "Could not find 'correction/tiss' Available options in 'correction': bypass"),
        ("hydra.job.chdir=maybe", "hydra.job.chdir=maybe: Value 'maybe' is not a valid bool"),
        ("nnodes", "Error parsing override 'nnodes'"),
    ],
)
def test_what_hydra_refuses_is_one_line_with_what_was_meant(word, said):
    with pytest.raises(ConfigError) as error:
        compose([word])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_failed_training_ends_with_its_error_and_how_to_go_on(tmp_path, monkeypatch):
    program = "print('(pid=7) flashrl_verl.errors.RefitError: step 2: no receipt'); raise SystemExit(3)"
    monkeypatch.setattr(run, "_make_assets", lambda config, console: {})
    monkeypatch.setattr(
        progress, "ProcessTree", lambda command, *rest: ProcessTree([sys.executable, "-c", program], *rest)
    )
    monkeypatch.setattr("flashrl_verl.tools.process_tree.GRACE", 0.1)
    result = CliRunner().invoke(app, ["quickstart", "--output", f"{tmp_path}/out", "hardware=cpu"])
    assert result.exit_code == 3 and json.loads((tmp_path / "out" / "run.json").read_text())["exit_code"] == 3
    assert "failed (exit code 3):\n  flashrl_verl.errors.RefitError: step 2: no receipt\n" in result.output
    assert f"whole log: {tmp_path}/out/train.log" in result.output and "with --resume" in result.output
