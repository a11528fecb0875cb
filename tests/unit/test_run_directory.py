# SPDX-License-Identifier: Apache-2.0
"""A new run moves the earlier one aside, and a resumed one is the same run or is refused."""

import json
from pathlib import Path

import pytest

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.quickstart.run import QuickstartConfig, check
from flashrl_verl.tools import run_directory


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _results(output: Path, text: str, checkpoints: Path | None = None) -> None:
    checkpoints = checkpoints or output / "checkpoints"
    (checkpoints / "global_step_2").mkdir(parents=True)
    (checkpoints / "global_step_2" / "model.pt").write_text(text)
    (checkpoints / run_directory.LATEST).write_text("2")
    for name in ("metrics.jsonl", "report.md", "train.log"):
        (output / name).write_text(text)


def _recorded(output: Path, *overrides: str, checkpoints: Path | None = None) -> None:
    """A run that was recorded and saved a checkpoint."""
    _, cfg = check(QuickstartConfig(output=output, overrides=("hardware=cpu", *overrides)))
    run_directory.begin_attempt(output, {"precision": "int8", "seed": 0}, cfg, resume=False)
    _results(output, "old", checkpoints)


def _assets(folder: Path) -> None:
    """What has to be there, where a run takes its assets from elsewhere."""
    (folder / "assets" / "model").mkdir(parents=True)
    for split in ("train", "test"):
        (folder / "assets" / f"{split}.parquet").touch()


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
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "assets",
        "checkpoints",
        "notes.txt",
        "previous-1",
        "previous-2",
    ]


def test_of_a_checkpoint_folder_elsewhere_only_verls_entries_are_moved(tmp_path):
    output, shared = tmp_path / "out", tmp_path / "shared"
    _recorded(output, f"trainer.default_local_dir={shared}", checkpoints=shared)
    (shared / "thesis.txt").write_text("mine")
    aside = run_directory.move_aside(output, shared)
    assert _tree(shared) == ["thesis.txt"]
    assert _tree(aside / "checkpoints") == ["global_step_2/model.pt", run_directory.LATEST]


@pytest.mark.parametrize("owner", ["a recorded run", "nobody known"])
@pytest.mark.parametrize("recorded", [True, False])
def test_checkpoints_that_no_run_of_the_directory_named_are_refused_and_stay(tmp_path, owner, recorded):
    theirs, output = tmp_path / "theirs", tmp_path / "out"
    _recorded(theirs) if owner == "a recorded run" else _results(theirs, "theirs")
    if recorded:
        _recorded(output)
    before = _tree(tmp_path)
    with pytest.raises(ConfigError) as caught:
        run_directory.move_aside(output, theirs / "checkpoints")
    assert _tree(tmp_path) == before and output.exists() == recorded
    stated, _, remedy = str(caught.value).partition(" Remedy: ")
    assert stated.startswith(f"trainer.default_local_dir={theirs / 'checkpoints'} is refused: ")
    assert (f"those of the run in {theirs}," if owner == "a recorded run" else "those of another run,") in stated
    assert "another trainer.default_local_dir" in remedy and "\n" not in remedy


def test_a_link_out_of_the_directory_makes_no_checkpoints_its_own(tmp_path):
    _recorded(tmp_path / "theirs")
    output = tmp_path / "out"
    output.mkdir()
    (output / "checkpoints").symlink_to(tmp_path / "theirs" / "checkpoints")
    with pytest.raises(ConfigError, match="is refused"):
        run_directory.move_aside(output, output / "checkpoints")


def test_a_folder_that_an_earlier_run_of_the_directory_named_is_its_own(tmp_path):
    output, shared = tmp_path / "out", tmp_path / "shared"
    _recorded(output, f"trainer.default_local_dir={shared}", checkpoints=shared)
    assert (
        run_directory.move_aside(output, output / "checkpoints") == output / "previous-1"
    )  # the next run saves in its own
    _recorded(output)
    assert run_directory.move_aside(output, shared) == output / "previous-2"
    assert _tree(output / "previous-2" / "checkpoints") == ["global_step_2/model.pt", run_directory.LATEST]


def test_a_relative_folder_in_the_record_starts_where_the_recipe_does(tmp_path):
    output, shared = tmp_path / "out", tmp_path / "checkout" / "shared"
    _recorded(output, "trainer.default_local_dir=shared", checkpoints=shared)
    with pytest.raises(ConfigError, match="is refused"):
        run_directory.move_aside(output, shared, root=tmp_path / "another")
    assert run_directory.move_aside(output, shared, root=tmp_path / "checkout")


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
    _recorded(tmp_path / "run")
    return tmp_path / "run"


def test_resuming_needs_a_checkpoint(tmp_path):
    with pytest.raises(FlashRLError, match="trainer.save_freq"):
        _attempt(tmp_path, resume=True)


def test_more_steps_other_loggers_and_more_memory_are_the_same_run(trained):
    words = [
        "trainer.total_training_steps=50",
        "trainer.logger=[console]",
        "trainer.save_freq=5",
        "trainer.test_freq=5",
    ]
    _attempt(trained, *words, "actor_rollout_ref.rollout.max_num_seqs=64", resume=True)
    assert (trained / "metrics.jsonl").read_text() == "old"


@pytest.mark.parametrize(
    ("words", "seed", "said"),
    [
        (["flashrl.precision=bf16"], 0, ["flashrl.precision=bf16 (was int8)"]),
        ([], 1, ["--seed=1 (was 0)", "data.seed=1 (was 0)"]),
        (
            ["algorithm.rollout_correction.rollout_is=null"],
            0,
            ["algorithm.rollout_correction.rollout_is=null (was token)"],
        ),
        (["actor_rollout_ref.actor.optim.lr=1e-3"], 0, ["actor_rollout_ref.actor.optim.lr=0.001 (was 0.0005)"]),
        (["data.train_batch_size=64"], 0, ["data.train_batch_size=64 (was 32)"]),
    ],
)
def test_another_run_is_refused_and_what_differs_is_named(trained, words, seed, said):
    with pytest.raises(ConfigError) as caught:
        _attempt(trained, *words, seed=seed, resume=True)
    message = str(caught.value)
    assert f"would be another one: {', '.join(said)}. Remedy:" in message and "\n" not in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.default_local_dir", "{0}/checkpoints"),
        ("trainer.resume_from_path", "{0}/checkpoints/global_step_2"),
        ("quickstart.assets", "{0}/assets"),  # another model and other data
    ],
)
def test_what_is_another_runs_is_refused_by_key(trained, tmp_path, key, value):
    _recorded(tmp_path / "theirs")
    _assets(tmp_path / "theirs")
    value = value.format(tmp_path / "theirs")
    with pytest.raises(ConfigError) as caught:
        _attempt(trained, f"{key}={value}", resume=True)
    assert f" {key}={value} (was " in str(caught.value)


@pytest.mark.parametrize("mode", ["disable", "resume_path", "null"])
def test_resuming_is_verls_auto_or_refused(trained, tmp_path, mode):
    words = (f"trainer.resume_mode={mode}", f"trainer.resume_from_path={tmp_path}/theirs/checkpoints/global_step_2")
    with pytest.raises(
        ConfigError, match=f"^trainer.resume_mode={mode} is refused: .* Remedy: leave trainer.resume_mode out"
    ):
        _attempt(trained, *words, resume=True)
    _attempt(trained, "trainer.resume_mode=auto", resume=True)


WHERE = {
    "its own": (),
    "checkpoints by another name": ("trainer.default_local_dir={output}/saved",),
    "assets elsewhere": ("quickstart.assets={outside}/assets",),
    "checkpoints elsewhere": ("trainer.default_local_dir={outside}/saved",),
    # Its name starts with that of the run's directory.
    "checkpoints beside it": ("trainer.default_local_dir={outside}/run-saved",),
}


@pytest.mark.parametrize("where", WHERE)
def test_a_run_that_was_moved_is_still_the_same(tmp_path, where):
    output, moved = tmp_path / "run", tmp_path / "elsewhere"
    _assets(tmp_path)

    def words(output):
        return [word.format(output=output, outside=tmp_path) for word in WHERE[where]]

    saved = [Path(word.partition("=")[2]) for word in words(output) if word.startswith("trainer.")]
    _recorded(output, *words(output), checkpoints=saved[0] if saved else None)
    _attempt(output.rename(moved), *words(moved), resume=True)


def test_a_run_that_was_moved_is_not_led_back_to_where_another_is_now(tmp_path):
    output, moved = tmp_path / "run", tmp_path / "moved"
    there = f"trainer.default_local_dir={output}/checkpoints"
    _recorded(output, there)
    output.rename(moved)
    _recorded(output)
    with pytest.raises(ConfigError, match="trainer.default_local_dir="):
        _attempt(moved, there, resume=True)
    with pytest.raises(ConfigError, match=f"those of the run in {output},"):
        run_directory.move_aside(moved, output / "checkpoints")


def test_a_moved_run_whose_record_does_not_say_where_it_was_is_still_the_same(trained, tmp_path):
    record = run_directory.read_record(trained)
    del record["output"]
    (trained / "run.json").write_text(json.dumps(record))
    _attempt(trained.rename(tmp_path / "elsewhere"), resume=True)


def test_without_the_configuration_the_record_is_compared(trained):
    (trained / run_directory.CONFIG_FILE).unlink()
    _attempt(trained, resume=True)
    with pytest.raises(ConfigError, match=r"flashrl.precision=bf16 \(was int8\)"):
        _attempt(trained, "flashrl.precision=bf16", resume=True)


def test_without_the_configuration_checkpoints_elsewhere_are_refused(trained, tmp_path):
    _recorded(tmp_path / "theirs")
    (trained / run_directory.CONFIG_FILE).unlink()
    with pytest.raises(ConfigError, match=f"those of the run in {tmp_path}/theirs,"):
        _attempt(trained, f"trainer.default_local_dir={tmp_path}/theirs/checkpoints", resume=True)


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


def test_a_killed_attempt_is_on_record(trained):
    record = run_directory.read_record(trained)
    assert record["attempts"] == [{"seconds": {}, "exit_code": None}] and record["seed"] == 0
