# SPDX-License-Identifier: Apache-2.0
"""What the trainer sends: every tensor of every update as it is now, in the rollout's dtype."""

import pytest
import ray
import torch

from flashrl_verl.refit.receipt import Manifest
from flashrl_verl.refit.sender import FlashRLServerAdapter, outgoing

CAST = (
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
)
ROUTERS = (
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.block_sparse_moe.router.weight",
    "model.layers.0.mlp.moe_statics.e_score_correction_bias",
    "model.layers.0.mlp.expert_bias",
)
"""Of Qwen3-MoE, Mixtral, Ernie-4.5 and AFMoE: these choose other experts when they are rounded."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tensor_of_every_update_is_sent_as_it_is_now_and_stands_on_the_receipt(dtype):
    g = torch.Generator().manual_seed(0)
    masters = {name: torch.randn(6, 4, generator=g) for name in (*CAST, *ROUTERS)} | {"counter": torch.arange(3)}
    for step in range(3):
        manifest = Manifest(step)
        sent = {n: t.clone() for n, t in outgoing(masters.items(), dtype, manifest)}
        assert sent.keys() == masters.keys() == manifest.receipt()["tensors"].keys()
        for name, master in masters.items():
            expected = master.to(dtype) if name in CAST else master
            assert sent[name].dtype == expected.dtype and torch.equal(sent[name], expected), name
            if name != "counter":
                master *= 1 + 2.0**-7  # one or two steps of BF16


@pytest.mark.parametrize(("error", "said"), [(None, None), ("ValueError: no", "stopped receiving: ValueError: no")])
def test_an_engine_that_has_loaded_all_before_its_last_answer_arrives_has_not_ended(monkeypatch, error, said):
    monkeypatch.setattr(ray, "wait", lambda futures, timeout: (futures, []))
    monkeypatch.setattr(ray, "get", lambda future: [{"error": error}])
    ended = FlashRLServerAdapter._why_ended(object(), object(), 3)
    assert (ended and ended.partition("the rollout engine ")[2]) == said
