# SPDX-License-Identifier: Apache-2.0
"""A new run moves the earlier one aside, and a resumed one is the same run or is refused."""

import json
from pathlib import Path

import pytest

from flashrl_verl import run_directory
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.quickstart import QuickstartConfig, check


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _results(output: Path, text: str, checkpoints: Path | None = None) -> None:
    checkpoints = checkpoints or output / "checkpoints"
    (checkpoints / "global_step_2").mkdir(parents=True)
    (checkpoints / "global_step_2" / "model.pt").write_text(text)
    (checkpoints / run_directory.LATEST).write_text("2")
    for name in ("metrics.jsonl", "report.md", "train.log"):
        (output / name).write_text(text)


# ---- moving aside ----


def test_earlier_results_are_numbered_and_never_deleted(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "assets").mkdir()
    for number, text in ((1, "first"), (2, "second")):
        _results(tmp_path, text)
        assert run_directory.move_aside(tmp_path, tmp_path / "checkpoints") == tmp_path / f"previous-{number}"
    kept = [
        "checkpoints/global_step_2/model.pt",
        f"checkpoints/{run_directory.LATEST}",
        "metrics.jsonl",
        "report.md",
        "train.log",
    ]
    for number, text in ((1, "first"), (2, "second")):
        assert _tree(tmp_path / f"previous-{number}") == kept
        assert (tmp_path / f"previous-{number}" / "checkpoints" / "global_step_2" / "model.pt").read_text() == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["assets", "checkpoints", "notes.txt", "previous-1", "previous-2"]


def test_of_a_checkpoint_folder_elsewhere_only_verls_entries_are_moved(tmp_path):
    shared = tmp_path / "shared"
    (tmp_path / "out").mkdir()
    _results(tmp_path / "out", "old", shared)
    (shared / "thesis.txt").write_text("mine")
    run_directory.move_aside(tmp_path / "out", shared)
    assert _tree(shared) == ["thesis.txt"]


def test_without_results_nothing_is_moved(tmp_path):
    output = tmp_path / "new"
    assert run_directory.move_aside(output, output / "checkpoints") is None
    (output / "run.json").write_text("{}")  # the warm-up failed
    assert run_directory.move_aside(output, output / "checkpoints") is None


# ---- resuming ----


def _attempt(output, *overrides, seed=0, resume=False):
    words = ("hardware=cpu", *overrides)
    return check(QuickstartConfig(output=output, seed=seed, resume=resume, overrides=words))[1]


@pytest.fixture
def trained(tmp_path):
    """A run that was recorded and saved a checkpoint."""
    output = tmp_path / "run"
    _, cfg = check(QuickstartConfig(output=output, overrides=("hardware=cpu",)))
    run_directory.begin_attempt(output, {"precision": "int8", "seed": 0}, cfg, resume=False)
    _results(output, "old")
    return output


def test_resuming_needs_a_checkpoint(tmp_path):
    with pytest.raises(FlashRLError, match="trainer.save_freq"):
        _attempt(tmp_path, resume=True)


def test_more_steps_other_loggers_and_more_memory_are_the_same_run(trained):
    words = ["trainer.total_training_steps=50", "trainer.logger=[console]", "trainer.save_freq=5", "trainer.test_freq=5"]
    _attempt(trained, *words, "actor_rollout_ref.rollout.max_num_seqs=64", resume=True)
    assert (trained / "metrics.jsonl").read_text() == "old"


@pytest.mark.parametrize(
    ("words", "seed", "said"),
    [
        (["flashrl.precision=bf16"], 0, ["flashrl.precision=bf16 (was int8)"]),
        ([], 1, ["--seed=1 (was 0)", "data.seed=1 (was 0)"]),
        (["algorithm.rollout_correction.rollout_is=null"], 0, ["algorithm.rollout_correction.rollout_is=null (was token)"]),
        (["actor_rollout_ref.actor.optim.lr=1e-3"], 0, ["actor_rollout_ref.actor.optim.lr=0.001 (was 0.0005)"]),
        (["data.train_batch_size=16"], 0, ["data.train_batch_size=16 (was 32)"]),
    ],
)
def test_another_run_is_refused_and_what_differs_is_named(trained, words, seed, said):
    with pytest.raises(ConfigError) as caught:
        _attempt(trained, *words, seed=seed, resume=True)
    message = str(caught.value)
    assert f"would be another one: {', '.join(said)}. Remedy:" in message and "\n" not in message


def test_a_run_that_was_moved_is_still_the_same(trained, tmp_path):
    moved = trained.rename(tmp_path / "elsewhere")
    _attempt(moved, resume=True)


def test_without_the_configuration_the_record_is_compared(trained):
    (trained / run_directory.CONFIG_FILE).unlink()
    _attempt(trained, resume=True)
    with pytest.raises(ConfigError, match=r"flashrl.precision=bf16 \(was int8\)"):
        _attempt(trained, "flashrl.precision=bf16", resume=True)


# ---- the record ----


def test_seconds_are_summed_over_attempts_and_memory_is_the_largest(trained):
    cfg = _attempt(trained, resume=True)
    for resume, seconds, peak in ((False, 10.0, 5), (True, 4.0, 7), (True, 1.5, 6)):
        record = run_directory.begin_attempt(trained, {"seed": 0}, cfg, resume=resume)
        record["attempts"][-1] |= {"seconds": {"training": seconds}, "peak_memory_bytes": peak, "exit_code": 130}
        run_directory.write_record(trained, record)
    read = json.loads((trained / "run.json").read_text())
    assert read["seconds"] == {"training": 15.5} and read["peak_memory_bytes"] == 7
    assert [attempt["seconds"]["training"] for attempt in read["attempts"]] == [10.0, 4.0, 1.5]


def test_a_record_from_before_attempts_counts_as_one(trained):
    (trained / "run.json").write_text(json.dumps({"seed": 0, "seconds": {"total": 3.0}, "exit_code": 0}))
    record = run_directory.begin_attempt(trained, {"seed": 0}, _attempt(trained, resume=True), resume=True)
    assert record["seconds"] == {"total": 3.0} and len(record["attempts"]) == 2


def test_a_killed_session_is_on_record(trained):
    record = run_directory.read_record(trained)
    assert record["attempts"] == [{"seconds": {}, "exit_code": None}] and record["seed"] == 0
