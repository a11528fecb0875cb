# SPDX-License-Identifier: Apache-2.0
"""The model of `flashrl bench mismatch` where an arm has scales by block: whole blocks, or a refusal before engines start."""

from pathlib import Path

import pytest
from recipe_runs import make_assets

from flashrl_verl.bench.arms import Arm
from flashrl_verl.bench.mismatch import MismatchConfig
from flashrl_verl.bench.mismatch_model import checkpoint, model_name, toy_config
from flashrl_verl.config import Precision
from flashrl_verl.errors import ConfigError
from flashrl_verl.toy.model import ToyModelConfig

BY_BLOCK = (Arm(precision=Precision.INT8), Arm(precision=Precision.FP8_BLOCK))


def folder(path: Path, **sizes: int) -> str:
    return str(make_assets(path, **sizes) / "model")


def test_a_model_that_is_not_whole_blocks_is_refused_with_the_layer(tmp_path):
    config = MismatchConfig(model=folder(tmp_path), arms=BY_BLOCK)
    with pytest.raises(ConfigError, match=r"--precision fp8_block: model\.layers\.0\.self_attn\.qkv_proj: .* 64 "):
        checkpoint(config, print)


def test_without_scales_by_block_it_is_taken(tmp_path):
    model = folder(tmp_path)
    assert checkpoint(MismatchConfig(model=model, arms=BY_BLOCK[:1]), print) == Path(model)


def test_the_toy_for_scales_by_block_is_whole_blocks_and_has_its_own_name(tmp_path):
    config = MismatchConfig(arms=BY_BLOCK)
    model = folder(tmp_path, num_kv_heads=toy_config(config).num_kv_heads)
    assert checkpoint(MismatchConfig(model=model, arms=BY_BLOCK), print) == Path(model)
    assert model_name(config) == "toy with 4 KV heads, for whole blocks"


def test_the_toy_of_other_arms_is_the_quickstarts():
    config = MismatchConfig()
    assert toy_config(config) == ToyModelConfig() and model_name(config) == "toy"
