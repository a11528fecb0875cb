# SPDX-License-Identifier: Apache-2.0
"""Paths that are not there are one error with their Hydra keys, before Ray; names of the model hub are no paths."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from flashrl_verl.errors import ConfigError
from flashrl_verl.local_paths import check_paths, missing_paths

ROOT = Path(__file__).resolve().parents[2]
MODEL = "actor_rollout_ref.model.path"


def _config(train=(), val=None, model="gpt2"):
    return OmegaConf.create(
        {
            "data": {"train_files": train if isinstance(train, str) else list(train), "val_files": val},
            "actor_rollout_ref": {"model": {"path": model}},
        }
    )


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen2.5-32B", "hdfs://cluster/a/b"])
def test_names_of_the_hub_and_addresses_are_not_looked_for(tmp_path, model):
    assert missing_paths(_config(model=model, train="hdfs://a/b.parquet"), root=tmp_path) == []


@pytest.mark.parametrize("model", ["/no/such", "./no", "../no/such", "~/no-such-model", "outputs/assets/model", "there/model"])
def test_what_looks_like_a_path_has_to_exist(tmp_path, model):
    (tmp_path / "there").mkdir()
    assert missing_paths(_config(model=model), root=tmp_path) == [(MODEL, model)]


def test_what_exists_is_accepted_wherever_it_is_written(tmp_path):
    for name in ("a.parquet", "there/model"):
        (tmp_path / name).mkdir(parents=True)
    check_paths(_config(["a.parquet", str(tmp_path / "a.parquet")], "./a.parquet", "there/model"), root=tmp_path)


def test_all_that_is_missing_is_one_line_with_its_keys(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_paths(_config("a.parquet", ["b.parquet"], "/no/such"), root=tmp_path)
    message = str(caught.value)
    for pair in ("data.train_files=a.parquet", "data.val_files=b.parquet", f"{MODEL}=/no/such", str(tmp_path)):
        assert pair in message
    assert "\n" not in message


def test_what_is_made_later_need_not_be_there(tmp_path):
    cfg = _config(str(tmp_path / "assets" / "train.parquet"), "gone.parquet")
    assert missing_paths(cfg, root=tmp_path, made_later=tmp_path / "assets") == [("data.val_files", "gone.parquet")]


@pytest.mark.parametrize("word", [(), pytest.param(("--dry-run",), marks=pytest.mark.slow)])
def test_the_recipe_refuses_before_ray_and_a_dry_run_only_warns(word):
    command = [
        sys.executable,
        "-m",
        "recipe.flashrl.main_flashrl",
        "experiment=quickstart",
        "quickstart.assets=/no/such",
        *word,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    said = "data.train_files=/no/such/train.parquet, data.val_files=/no/such/test.parquet, actor_rollout_ref.model.path=/no"
    if word:
        assert done.returncode == 0 and f"Warning: {said}" in done.stdout and "not found on this machine" in done.stdout
    else:
        assert done.returncode == 1 and f"ConfigError: {said}" in done.stderr and "flashrl quickstart" in done.stderr
        assert "Ray" not in done.stdout + done.stderr and "Traceback" not in done.stderr
