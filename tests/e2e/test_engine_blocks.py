# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in ``fp8_block`` takes updates: its blocks against a recomputation, and faults that must stop the run.

What does not depend on how scales are grouped is in ``test_engine_refit.py``.
"""

import pytest
import torch
from engines import CUDA, Refit, greedy
from engines import engine as start_engine
from references import assert_storage
from tiny_models import LAYERS, make, sizes, wire

from flashrl_verl.config import FlashRLConfig
from flashrl_verl.errors import ConfigError, RefitError
from flashrl_verl.quantization.numerics import as_bytes
from flashrl_verl.rollout.bucket_program import BucketProgram
from flashrl_verl.rollout.server import require_precision

pytestmark = pytest.mark.cpu_e2e

DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def trainer():
    return make("qwen2.5", **sizes("qwen2.5", "fp8_block"))


@pytest.fixture(scope="module")
def engine(trainer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    trainer.config.save_pretrained(path)
    with start_engine(path, {"precision": "fp8_block"}, compiled=CUDA, enable_sleep_mode=CUDA) as llm:
        yield llm


@pytest.fixture
def refit(engine) -> Refit:
    """A fresh account of the engine's model, called to send it an update."""
    return Refit(engine)


def assert_blocks(refit: Refit, weights: dict[str, torch.Tensor]) -> None:
    counts = assert_storage(dict(refit.model.named_parameters()), weights, "fp8_block")
    assert counts["quantized"] == 4 * LAYERS


def changed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: (tensor.float() * 1.3 + 0.01).to(tensor.dtype) for name, tensor in weights.items()}


def test_the_engine_is_what_it_is_called(engine):
    (layers,) = engine.collective_rpc("flashrl_layers")
    require_precision(FlashRLConfig(precision="fp8_block"), layers)
    assert layers["precision"] == "fp8_block" and layers["quantized"] == {"float8_e4m3fn by 128x128": 4 * LAYERS}
    assert layers["quantized_bytes"] == layers["quantized_bytes_as_bf16"] // 2 * (1 + 4 / 128**2)


def test_blocks_follow_the_trainer_at_the_same_addresses_and_the_same_weights_give_the_same_output(engine, trainer, refit):
    first = wire(trainer)
    refit(first, step=0)
    assert_blocks(refit, first)
    addresses = {n: p.data_ptr() for n, p in refit.model.named_parameters()}
    output = greedy(engine)
    report = refit(changed(first), step=1)
    assert_blocks(refit, changed(first))
    assert report["updated"] == len(first) and report["code_change_rate"] > 0.1
    assert greedy(engine) != output
    refit(first, step=2)
    assert greedy(engine) == output
    assert {n: p.data_ptr() for n, p in refit.model.named_parameters()} == addresses


def test_an_update_mends_poisoned_storage_and_no_layer_is_deaf(engine, trainer, refit):
    weights = wire(trainer)
    refit(weights, step=0)
    output = greedy(engine)
    assert refit.account.poison(refit.post_process) == []
    refit(weights, step=1)
    assert_blocks(refit, weights)
    assert greedy(engine) == output


@pytest.mark.parametrize("first_update", [True, False], ids=["first update", "later update"])
def test_nan_in_one_block_is_named(trainer, refit, first_update):
    if not first_update:
        refit(wire(trainer), step=0)
    weights = wire(trainer)
    weights[UP_PROJ][300, 200] = float("nan")
    with pytest.raises(RefitError, match=rf"step 3: .*NaN or Inf in {UP_PROJ}:"):
        refit(weights, step=3)


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_storage_that_does_not_match_what_arrived_is_noticed(trainer, refit, monkeypatch, part):
    refit(wire(trainer), step=0)
    run = BucketProgram.run
    weight = dict(refit.model.named_parameters())[DOWN_PROJ]

    def wrong(program, weights, flag):
        run(program, weights, flag)
        if DOWN_PROJ not in program.passed.shapes:
            return
        if part == "codes":
            as_bytes(weight.data)[:, 3] ^= 1
        else:
            weight.scales.data[:, 1] *= 1.01

    monkeypatch.setattr(BucketProgram, "run", wrong)
    with pytest.raises(RefitError, match=rf"stored codes are not those of the tensors that arrived: {DOWN_PROJ}\. Nothing"):
        refit(wire(trainer), step=1)


def test_a_block_that_nothing_is_loaded_into_is_noticed(trainer, refit):
    weights = wire(trainer)
    del weights[UP_PROJ]
    with pytest.raises(RefitError, match=r"not written exactly once: model\.layers\.1\.mlp\.gate_up_proj"):
        refit(weights, step=0)


def test_a_model_that_is_not_whole_blocks_is_refused_when_the_engine_starts(tmp_path):
    model = make("qwen2.5", hidden_size=256, intermediate_size=344)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"gate_up_proj: flashrl\.precision=fp8_block .* 344 output rows x 256 input columns"):
        with start_engine(tmp_path, {"precision": "fp8_block"}):
            pass
