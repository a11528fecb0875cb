# SPDX-License-Identifier: Apache-2.0
"""The command line, and the quickstart's handling of overrides and directories."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.input_files import LATEST
from flashrl_verl.quickstart import progress, run
from flashrl_verl.quickstart.run import QuickstartConfig, check, training_overrides
from flashrl_verl.tools.process_tree import ProcessTree
from flashrl_verl.tools.recipe_process import compose, quoted

# ---- the quickstart, before anything is made ----


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--sede=3", "--sede=3"),
        ("precision", "'precision' is neither"),
        ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_p=0.9 is refused"),
        ("trainer.total_training_steps=null", "trainer.total_training_steps=None"),
        ("trainer.no_such_key=1", "trainer.no_such_key"),
        ("data.seed=1", "out holds a run already. Remedy: --resume"),
        ("--output={}/no", "no is not there, so that there is no run to resume"),
        ("--output={}/out/metrics.jsonl", "File exists: "),
        ("--output={}/out/metrics.jsonl/folder", "Not a directory: "),
    ],
)
def test_a_refused_word_leaves_every_earlier_run_where_it_is(tmp_path, monkeypatch, word, said):
    monkeypatch.setattr(run, "make_assets", None)  # or what is not refused would be trained
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("old")
    words = ["quickstart", "--output", f"{tmp_path}/out", "hardware=cpu", word.format(tmp_path)]
    words += ["--resume"] * word.endswith("/no")
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError | OSError) and said in str(result.exception)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["metrics.jsonl", "out"]


def test_a_run_is_not_resumed_past_its_end_unless_it_is_given_more_steps(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    latest = tmp_path / "checkpoints" / LATEST

    def resume(steps=None):
        config = QuickstartConfig(output=tmp_path, steps=steps, resume=True, overrides=("hardware=cpu",))
        return check(config)[1].trainer

    latest.write_text("10")
    assert resume().resume_mode == "auto" and resume().total_training_steps == 28
    latest.write_text("28")
    with pytest.raises(ConfigError, match="has its 28 steps. Remedy: more, by --steps N"):
        resume()
    assert resume(30).total_training_steps == 30


@pytest.mark.parametrize("folder", ["/plain", "/two words/it's=1", "/a=b,c", "/[x]{y}"])
def test_the_users_overrides_win_and_any_path_can_be_one(folder):
    words = ("experiment=smoke", "hardware=cpu", "data.seed=9", f"trainer.project_name={quoted(folder)}")
    words += ("actor_rollout_ref.model.path=~/model",)
    cfg = compose(training_overrides(QuickstartConfig(output=Path(folder), overrides=words)))
    assert cfg.actor_rollout_ref.model.path == str(Path.home() / "model")
    assert cfg.trainer.device == "cpu" and cfg.data.seed == 9 and cfg.trainer.project_name == folder
    assert cfg.data.train_files == f"{folder}/assets/train.parquet"
    assert cfg.trainer.default_local_dir == f"{folder}/checkpoints"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor_rollout_ref.rolout.n=3", "no key actor_rollout_ref.rolout. Remedy: actor_rollout_ref.rollout"),
        ("corection=none", "no key corection. Remedy: correction"),
        ("dapo_qwen2.5_32b_int8", "dapo_qwen2.5_32b_int8 is no key=value. Remedy: one such as trainer.nnodes=1"),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", "Remedy: algorithm.rollout_correction.rollout_is_threshold"),
        ("trainer.x=1", "no key trainer.x. Remedy: --cfg job"),
        ("correction=tiss", "Could not find 'correction/tiss' Available options in 'correction': bypass"),
        ("hydra.job.chdir=maybe", "hydra.job.chdir=maybe: Value 'maybe' is not a valid bool"),
    ],
)
def test_what_hydra_refuses_is_one_line_with_what_was_meant(word, said):
    with pytest.raises(ConfigError) as error:
        compose([word])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_failed_training_ends_with_its_error_and_how_to_go_on(tmp_path, monkeypatch):
    program = "import os; open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write("
    program += """'{"step": 1, "data": {"rollout_corr/k3_kl": null, "critic/score/mean": 0.5}}\\n');"""  # NaN
    program += "print('(pid=7) flashrl_verl.errors.RefitError: step 2: no receipt'); raise SystemExit(3)"
    monkeypatch.setattr(run, "make_assets", lambda root, **words: {"greedy": 0.5, "sampled": 0.4})
    monkeypatch.setattr(
        progress, "ProcessTree", lambda command, *rest: ProcessTree([sys.executable, "-c", program], *rest)
    )
    monkeypatch.setattr("flashrl_verl.tools.process_tree.GRACE", 0.1)
    result = CliRunner().invoke(app, ["quickstart", "--output", f"{tmp_path}/out", "hardware=cpu"])
    assert result.exit_code == 3
    assert "failed (exit code 3):\n  flashrl_verl.errors.RefitError: step 2: no receipt\n" in result.output
    assert re.search(r"step 1/\d+, score of kept groups 0.50, mismatch KL nan", result.output)
    assert f"whole log: {tmp_path}/out/train.log" in result.output and "with --resume" in result.output
