# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire: the rollout's dtype, except routers and integers."""

import pytest
import torch

from flashrl_verl.refit.receipt import Manifest
from flashrl_verl.refit.sender import _Stopwatch, cast_for_rollout, outgoing
from flashrl_verl.rollout.padded_vocab import PaddedVocabularyMeter

MATRIX, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


def test_floating_weights_are_cast_and_routers_keep_their_precision():
    weights = {
        "model.layers.0.mlp.gate_proj.weight": torch.randn(3, 4),
        "model.layers.0.mlp.gate.weight": torch.randn(3, 4),
        "model.layers.0.block_sparse_moe.router.weight": torch.randn(3, 4),
        "model.layers.0.mlp.moe_statics.e_score_correction_bias": torch.randn(3),
        "model.layers.0.mlp.expert_bias": torch.randn(3),
        "model.embed_tokens.weight": torch.randn(3, 4, dtype=torch.bfloat16),
        "counter": torch.arange(3),
    }
    sent = dict(cast_for_rollout(weights.items(), torch.bfloat16))
    assert {name: tensor.dtype for name, tensor in sent.items()} == {
        "model.layers.0.mlp.gate_proj.weight": torch.bfloat16,
        "model.layers.0.mlp.gate.weight": torch.float32,
        "model.layers.0.block_sparse_moe.router.weight": torch.float32,
        "model.layers.0.mlp.moe_statics.e_score_correction_bias": torch.float32,
        "model.layers.0.mlp.expert_bias": torch.float32,
        "model.embed_tokens.weight": torch.bfloat16,
        "counter": torch.int64,
    }
    expected = weights["model.layers.0.mlp.gate_proj.weight"].bfloat16()
    assert torch.equal(sent["model.layers.0.mlp.gate_proj.weight"], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tensor_of_every_update_is_sent_as_it_is_now_and_stands_on_the_receipt(dtype):
    g = torch.Generator().manual_seed(0)
    masters = {name: torch.randn(6, 4, generator=g) for name in (MATRIX, "model.embed_tokens.weight", "lm_head.weight")}
    masters[NORM] = torch.rand(4, generator=g)
    for step in range(3):
        manifest = Manifest(step)
        sent = {n: t.clone() for n, t in outgoing(masters.items(), dtype, manifest, _Stopwatch("cpu"))}
        assert sent.keys() == masters.keys() and manifest.receipt()["tensors"].keys() == masters.keys()
        assert all(torch.equal(sent[name], master.to(dtype)) for name, master in masters.items())
        for master in masters.values():
            master *= 1 + 2.0**-7  # one or two steps of BF16


class Model(torch.nn.Module):
    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = logits

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits


def test_the_measured_mass_is_that_of_the_columns_past_the_tokenizer():
    probabilities = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.25, 0.25, 0.1, 0.4]])
    model = Model(probabilities.log())
    meter = PaddedVocabularyMeter.attach(model, 4, 2)
    assert torch.equal(model.compute_logits(torch.zeros(1)), probabilities.log()), "the logits pass unchanged"
    assert abs(meter.mass() - (0.3 + 0.5) / 2) < 1e-6
    meter.reset()
    assert meter.mass() == 0.0


def test_a_vocabulary_without_padding_is_not_touched():
    model = Model(torch.zeros(1, 4))
    assert PaddedVocabularyMeter.attach(model, 4, 4) is None
    assert "compute_logits" not in vars(model)
