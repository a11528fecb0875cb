# SPDX-License-Identifier: Apache-2.0
"""``flashrl.fp32_lm_head`` in real engines: log-probs are those of FP32 logits, through refits, tied and not, cut or
whole."""

import pytest
import torch
from engines import CUDA, Refit, engine, parallel_engine, teacher_forced, update
from tiny_models import LAYERS, VOCAB, make, wire
from transformers import PreTrainedModel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SEQUENCES = [torch.randint(VOCAB, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]
INT8 = {"precision": "int8", "fp32_lm_head": True}


def with_large_logits(name: str, tied: bool, seed: int = 0) -> PreTrainedModel:
    """Every row of the head has a vector in common, so that logits of one token are large and close together: soft-max
    does not see what they share, BF16 rounds by it."""
    model = make(name, seed, tie_word_embeddings=tied)
    with torch.no_grad():
        common = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(seed + 50))
        model.get_output_embeddings().weight.add_(3 * common)
    return model


def log_probs(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Of every token after the first; logits [T - 1, V] are those before each."""
    return logits.double().log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None]).squeeze(-1)


# Llama's class ties by `tie_weights`, Qwen2's multiplies by the embedding layer itself.
@pytest.mark.parametrize("name, tied", [("qwen2.5", False), ("qwen2.5", True), ("llama3", True)])
def test_log_probs_are_those_of_fp32_logits_through_refits(tmp_path, monkeypatch, name, tied):
    with_large_logits(name, tied).config.save_pretrained(tmp_path)
    with engine(tmp_path, {"precision": "bf16", "fp32_lm_head": True}) as llm:
        (layers,) = llm.collective_rpc("flashrl_layers")
        assert layers["head_dtype"] == "float32"
        refit, seen = Refit(llm), []
        compute = refit.model.compute_logits
        monkeypatch.setattr(
            refit.model, "compute_logits", lambda hidden, *rest: (seen.append(hidden.cpu()), compute(hidden, *rest))[1]
        )
        for step, ids in enumerate(SEQUENCES):
            weights = wire(with_large_logits(name, tied, seed=step))
            refit(weights, step)
            seen.clear()
            ours = torch.tensor(teacher_forced(llm, [ids])[0]).double()
            hidden = max(seen, key=len)[: len(ids) - 1].double()  # the others are of the token to sample
            logits = hidden @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].double().t()
            assert (ours - log_probs(logits, ids)).abs().max() < 1e-6 * logits.abs().max(), "FP32 sums have 2^-24"
            rounded = log_probs(logits.bfloat16(), ids)
            assert (ours - rounded).abs().max() > 0.05, "BF16 logits would be told apart"


@pytest.mark.skipif(CUDA and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_gather_fp32_logits_and_give_the_log_probs_of_one(tmp_path, tied):
    trainer = with_large_logits("qwen2.5", tied)
    trainer.config.save_pretrained(tmp_path)
    with engine(tmp_path, INT8) as llm:
        Refit(llm)(wire(trainer), 0)
        one = torch.tensor(teacher_forced(llm, SEQUENCES))
    with parallel_engine(tmp_path, INT8, 2) as llm:
        ranks = llm.collective_rpc("flashrl_layers")
        assert [(r["head_dtype"], r["quantized_layers"]) for r in ranks] == [("float32", 4 * LAYERS)] * 2
        update(llm, 2, wire(trainer), 0)
        two = torch.tensor(teacher_forced(llm, SEQUENCES))
        assert (two - one).abs().max() < 0.1, "activations of a rank have scales of their own"
