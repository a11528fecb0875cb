# SPDX-License-Identifier: Apache-2.0
"""What cannot be exported is told, and nothing is left behind."""

import shutil
from pathlib import Path

import engines  # noqa: F401 - chooses verl's platform, which verl reads once
import pytest
import torch
from tiny_models import make

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.export.export import Request, export
from flashrl_verl.tools.export.source import meta_model, open_checkpoint


def edited(of_two, tmp_path: Path, change) -> Path:
    """A copy of the checkpoint whose rank 1 has another state."""
    checkpoint = shutil.copytree(of_two[0], tmp_path / "global_step_2")
    file = checkpoint / "actor" / "model_world_size_2_rank_1.pt"
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)
    return checkpoint


def left_behind(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != "global_step_2"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])  # the last becomes Inf by rounding
def test_a_tensor_that_is_not_finite_is_named_and_nothing_is_written(of_two, tmp_path, bad):
    def spoil(state):
        state["model.layers.1.mlp.up_proj.weight"].to_local()[2, 5] = bad

    checkpoint = edited(of_two, tmp_path, spoil)
    with pytest.raises(FlashRLError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or Inf at 1 of"):
        export(Request(checkpoint=checkpoint, output=tmp_path / "out"))
    assert left_behind(tmp_path) == []


def test_a_missing_shard_is_named(of_two, tmp_path):
    checkpoint = shutil.copytree(of_two[0], tmp_path / "global_step_2")
    (checkpoint / "actor" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(FlashRLError, match=r"model_world_size_2_rank_1\.pt"):
        export(Request(checkpoint=checkpoint, output=tmp_path / "out"))
    assert left_behind(tmp_path) == []


def test_another_models_configuration_is_refused(of_two, tmp_path):
    checkpoint = shutil.copytree(of_two[0], tmp_path / "global_step_2")
    make("qwen3").config.save_pretrained(checkpoint / "actor" / "huggingface")
    with pytest.raises(FlashRLError, match=r"missing \(model\.layers\.0\.self_attn\.k_norm.*unexpected"):
        export(Request(checkpoint=checkpoint, output=tmp_path / "out"))


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(of_two, tmp_path):
    checkpoint = shutil.copytree(of_two[0], tmp_path / "global_step_2")
    file = checkpoint / "actor" / "model_world_size_2_rank_0.pt"

    def touch(doing: str, done: int, total: int) -> None:
        file.touch()

    with pytest.raises(FlashRLError, match="written to while it was read"):
        export(Request(checkpoint=checkpoint, output=tmp_path / "out"), touch)
    assert left_behind(tmp_path) == []


def test_what_is_there_is_not_overwritten_and_a_small_disk_is_refused(of_two, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="is not overwritten"):
        export(Request(checkpoint=of_two[0], output=tmp_path / "out"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(ConfigError, match=r"needs 0\.1 GB"):
        export(Request(checkpoint=of_two[0], output=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "layers, said",
    [
        ({"ignore": ["model.layers.0.mlp.dwn_proj"]}, "matches no layer"),
        ({"ignore": ["re:.*q_proj"]}, "Name all of them"),
        ({"keep_first_layers": 2}, "leave nothing to quantize"),
    ],
)
def test_layers_that_cannot_be_kept_so_are_refused(of_two, tmp_path, layers, said):
    layers = {"ignore": [], "keep_first_layers": 0, "keep_last_layers": 0, **layers}
    with pytest.raises(ConfigError, match=said):
        export(Request(checkpoint=of_two[0], output=tmp_path / "out", format=Precision.INT8, layers=layers))


def test_folders_that_are_no_checkpoint_say_what_to_name(of_two, tmp_path):
    with pytest.raises(ConfigError, match="Name one of them, such as .*global_step_2"):
        open_checkpoint(of_two[0].parent)
    with pytest.raises(ConfigError, match=r"no fsdp_config\.json.*trainer\.save_freq"):
        open_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "global_step_5").mkdir(parents=True)
    with pytest.raises(ConfigError, match="Name one of them, such as .*checkpoints/global_step_5"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(ConfigError, match=r"quantized already \(fp8\)"):
        open_checkpoint(tmp_path)


def test_a_large_models_names_need_no_memory(tmp_path):
    from flashrl_verl.tools.engines.shapes import load_config, save_config

    model = meta_model(save_config(load_config("qwen3-30b-a3b"), tmp_path / "model"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
