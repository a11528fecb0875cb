# SPDX-License-Identifier: Apache-2.0
"""`flashrl bench learning-pack` and `learning-unpack`: what travels, and that a torn archive leaves nothing."""

import json
import os
import resource
import sys
from contextlib import contextmanager

import pytest
from learning_runs import KEY, config, write_metrics, write_record
from omegaconf import OmegaConf
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.learning_archive import pack, part_of, parts_of, unpack
from benchmarks.learning_run import Attempt, Status, process_of, state_of, stop_all
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.tools.run_directory import LATEST


def write(path, content=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def cfg(tmp_path):
    """A finished run, an unfinished one with two checkpoints, one that is new."""
    made = config(tmp_path / "out")
    finished, unfinished, *_ = made.runs()
    write(made.output / "settings.json", b"{}")
    write(made.output / "assets" / "model" / "model.safetensors", os.urandom(5000))
    manifest = {"recipe": {}, "made": {}, "files": {"model/model.safetensors": 5000}}
    write(made.output / "assets" / "manifest.json", json.dumps(manifest).encode())
    write(made.output / "learning.png")
    write_metrics(finished, {0: {KEY: 0.3}, 4: {KEY: 0.5}})
    write(finished.folder / "model" / "model.safetensors", os.urandom(3000))
    write(finished.folder / "checkpoints" / "global_step_4" / "actor" / "model.pt", os.urandom(9000))
    write_metrics(unfinished, {0: {KEY: 0.3}, 1: {}, 2: {}, 3: {}})
    write_record(unfinished, {"exit_code": 130})
    for step in (1, 2):
        write(unfinished.folder / "checkpoints" / f"global_step_{step}" / "actor" / "optim.pt", os.urandom(9000))
    write(unfinished.folder / "checkpoints" / LATEST, b"2")
    write(unfinished.folder / "train.log", b"a" * 100_000 + b"the end")
    return made


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_needed_to_go_on_comes_back_and_nothing_else(cfg, tmp_path):
    parts = pack(cfg.output, tmp_path / "a" / "runs.tar", 4000)
    assert len(parts) == 5 and all(part.stat().st_size <= 4000 for part in parts)
    unpack(tmp_path / "a" / "runs.tar", tmp_path / "back")
    before, after = files_of(cfg.output), files_of(tmp_path / "back")
    log = "runs/int8-tis-seed0/train.log"
    left_out = {
        "learning.png",
        "runs/bf16-none-seed0/checkpoints/global_step_4/actor/model.pt",
        "runs/int8-tis-seed0/checkpoints/global_step_1/actor/optim.pt",
    }
    assert after.keys() == before.keys() - left_out
    assert after.pop(log).endswith(b"athe end") and len(before[log]) > 100_000
    assert all(before[name] == content for name, content in after.items())
    found = [state_of(run, 4) for run in config(tmp_path / "back").runs()]
    assert [s.status for s in found] == [Status.FINISHED, Status.UNFINISHED, Status.NEW, Status.NEW]
    assert found[1].resumes_at == 2


@pytest.mark.parametrize("harm", ["the last part is missing", "a part in the middle is missing", "one bit is another"])
def test_a_damaged_archive_is_refused_and_leaves_nothing(cfg, tmp_path, harm):
    archive = tmp_path / "runs.tar"
    parts = pack(cfg.output, archive, 4000)
    if harm == "one bit is another":
        content = bytearray(parts[2].read_bytes())
        content[2000] ^= 1
        parts[2].write_bytes(content)
    else:
        parts[-1 if "last" in harm else 2].unlink()
    with pytest.raises(FlashRLError, match="missing or damaged"):
        unpack(archive, tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"out"}


def test_a_smaller_archive_leaves_no_parts_of_a_larger_one(cfg, tmp_path):
    archive = tmp_path / "runs.tar"
    assert len(pack(cfg.output, archive, 1000)) > len(pack(cfg.output, archive, 4000)) == len(parts_of(archive))
    assert not part_of(archive, 5).exists()


def test_parts_of_an_older_archive_behind_a_gap_do_not_join_a_newer_one(cfg, tmp_path):
    archive, other = tmp_path / "runs.tar", tmp_path / "runs.tar.2"
    pack(cfg.output, archive, 1000)
    part_of(archive, 7).unlink()
    write(other)  # somebody else's
    parts = pack(cfg.output, archive, 4000)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [*(p.name for p in parts), other.name]


@contextmanager
def no_file_longer_than(size):
    """As on a full disk: writing fails, after ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_pack_that_fails_in_the_middle_leaves_the_older_archive_as_it_was(cfg, tmp_path):
    archive = tmp_path / "a" / "runs.tar"
    pack(cfg.output, archive, 4000)
    before = files_of(archive.parent)
    write(cfg.output / "assets" / "model" / "model.safetensors", os.urandom(5000))
    with no_file_longer_than(3000), pytest.raises(OSError):
        pack(cfg.output, archive, 4000)
    assert files_of(archive.parent) == before
    unpack(archive, tmp_path / "back")


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (
            "runs/int8-tis-seed0/checkpoints/global_step_2",
            "int8-tis-seed0.*names step 2.*is gone.*Put it back, or remove",
        ),
        ("assets/model", "assets is gone or not whole"),
        ("assets", "assets is gone or not whole"),
    ],
)
def test_a_folder_whose_runs_could_not_go_on_is_not_packed(cfg, tmp_path, gone, named):
    (cfg.output / gone).rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=named):
        pack(cfg.output, tmp_path / "a" / "runs.tar", 4000)
    assert not (tmp_path / "a").exists()


def test_a_folder_of_which_a_run_is_going_on_is_not_packed(cfg, tmp_path):
    run = cfg.runs()[2]
    attempt = Attempt(run, [sys.executable, "-c", "import time; time.sleep(99)"], {}, OmegaConf.create({}))
    try:
        with pytest.raises(ConfigError, match=f"bf16-none-seed1 is going on as process {process_of(run.folder)}"):
            pack(cfg.output, tmp_path / "runs.tar", 4000)
    finally:
        stop_all([attempt])
    assert pack(cfg.output, tmp_path / "runs.tar", 4000)


def test_neither_a_folder_of_something_else_is_packed_nor_one_overwritten(cfg, tmp_path):
    with pytest.raises(ConfigError, match="no --output of flashrl bench learning"):
        pack(tmp_path, tmp_path / "a", 4000)
    pack(cfg.output, tmp_path / "a", 4000)
    with pytest.raises(ConfigError, match="is there already"):
        unpack(tmp_path / "a", cfg.output)
    with pytest.raises(ConfigError, match="without the number"):
        unpack(tmp_path / "a.00", tmp_path / "back")


def test_the_commands_say_what_was_written(cfg, tmp_path):
    words = ["learning-pack", str(cfg.output), str(tmp_path / "a"), "--part-mb", "0.01"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "0.0 MB in 2 files" in result.output
    assert CliRunner().invoke(app, ["learning-unpack", str(tmp_path / "a"), str(tmp_path / "b")]).exit_code == 0
    assert (tmp_path / "b" / "settings.json").is_file()
