# SPDX-License-Identifier: Apache-2.0
"""Outlier channels of the toy model: its function stays, to the bit."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.toy.outliers import OutlierConfig
from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart.assets import AssetsConfig, make_assets
from flashrl_verl.quickstart.model import ToyModelConfig, build_model
from flashrl_verl.quickstart.tokenizer import build_tokenizer
from flashrl_verl.quickstart.warmup import WarmupConfig


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def ids(tokenizer):
    return torch.randint(len(tokenizer), (4, 40), generator=torch.Generator().manual_seed(3))


def model_of(tokenizer, dtype):
    return build_model(tokenizer, ToyModelConfig(), seed=7).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [2, 64])
def test_the_outputs_are_the_same_to_the_bit(tokenizer, ids, dtype, factor):
    model = model_of(tokenizer, dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        expected = model(ids).logits
        OutlierConfig(factor=factor).plant(model, seed=5)
        assert torch.equal(model(ids).logits, expected)
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {
        name
        for name in before
        if "layers" in name and name.endswith(("layernorm.weight", "proj.weight")) and "o_proj" not in name
    }


@pytest.mark.parametrize("factor", [-2, 0, 1, 3, 48])
def test_a_factor_that_would_round_is_refused(factor):
    with pytest.raises(ConfigError, match=f"--outliers {factor}: a power of two"):
        OutlierConfig(factor=factor)


def test_assets_are_made_with_the_outliers_that_are_asked_for(tmp_path):
    brief = AssetsConfig(
        model=ToyModelConfig(hidden_size=64, intermediate_size=64, num_layers=1),
        warmup=WarmupConfig(target_accuracy=0.0, probe_every=1, batch_size=8),
    )
    with_some = dataclasses.replace(brief, outliers=OutlierConfig(factor=16))
    folders = {name: make_assets(tmp_path / name, config) for name, config in (("no", brief), ("yes", with_some))}
    weights = [load_file(assets.model / "model.safetensors") for assets in folders.values()]
    name = "model.layers.0.input_layernorm.weight"
    assert torch.unique((weights[1][name] / weights[0][name]).float()).tolist() == [1.0, 16.0]
    assert make_assets(tmp_path / "yes", with_some).reused and not make_assets(tmp_path / "yes", brief).reused
