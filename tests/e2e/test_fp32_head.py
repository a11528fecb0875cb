# SPDX-License-Identifier: Apache-2.0
"""``flashrl.fp32_lm_head`` in real engines: log-probs are those of FP32 logits, through refits, tied and not, cut or
whole."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from engines import CUDA, Refit, engine, greedy, parallel_engine, runner, teacher_forced, update
from large_logits import model_with_large_logits, save, sleep_and_wake
from tiny_models import LAYERS, VOCAB, wire
from transformers import PreTrainedModel
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.lm_head import compute_head_in_fp32
from flashrl_verl.rollout.inspection import require_settings
from flashrl_verl.settings import FlashRLConfig

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

# Llama's class ties by `tie_weights`, Qwen2's multiplies by the embedding layer itself.
MODELS = [("qwen2.5", False), ("qwen2.5", True), ("llama3", True)]
SEQUENCES = [torch.randint(VOCAB, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(6)]


def log_probs(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Of every token after the first; logits [T - 1, V] are those before each."""
    return logits.double().log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None]).squeeze(-1)


class Watched:
    """The hidden states that an engine's model was asked for logits of."""

    def __init__(self, llm):
        self.model, self.hidden = runner(llm).model, []

    def __enter__(self) -> "Watched":
        compute = self.model.compute_logits
        self.model.compute_logits = lambda hidden, *rest: (self.hidden.append(hidden.cpu()), compute(hidden, *rest))[1]
        return self

    def __exit__(self, *error) -> None:
        del self.model.compute_logits


def vllms_own_head(model: torch.nn.Module) -> Iterator[VocabParallelEmbedding]:
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method = UnquantizedEmbeddingMethod()
            layer.quant_method.process_weights_after_loading(layer)
            yield layer


@pytest.mark.parametrize("name, tied", MODELS)
def test_log_probs_are_those_of_fp32_logits_and_follow_an_fp32_trainer_through_refits(tmp_path, name, tied):
    trainer = model_with_large_logits(name, tied, seed=0)
    save(trainer, tmp_path / "model")
    with engine(tmp_path / "model", {"precision": "bf16", "fp32_lm_head": True}) as llm:
        (layers,) = llm.collective_rpc("flashrl_layers")
        assert layers["head_dtype"] == "float32"
        require_settings(FlashRLConfig(precision="bf16", fp32_lm_head=True), layers)
        with pytest.raises(ConfigError, match="fp32_lm_head=false, but the engine"):
            require_settings(FlashRLConfig(precision="bf16"), layers)
        refit = Refit(llm)
        for step in range(3):
            trainer = model_with_large_logits(name, tied, seed=step)
            weights = wire(trainer)
            refit(weights, step)
            head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"].double()
            ids = SEQUENCES[step]
            with Watched(llm) as seen:
                ours = torch.tensor(teacher_forced(llm, [ids])[0]).double()
            logits = (
                max(seen.hidden, key=len)[: len(ids) - 1].double() @ head.t()
            )  # the others are of the token to sample
            exact, rounded = log_probs(logits, ids), log_probs(logits.to(torch.bfloat16), ids)
            assert (ours - exact).abs().max() < 1e-6 * logits.abs().max(), "FP32 sums have 2^-24 of their terms"
            assert (ours - rounded).abs().max() > 0.05, "BF16 logits would be told apart"
        # The whole path, against a trainer of its own: both sides in FP32, one side, and both in BF16.
        on_bf16 = trainer_log_probs(trainer.to(torch.bfloat16))
        compute_head_in_fp32(trainer)
        on_fp32 = trainer_log_probs(trainer)
        both = distance(teacher_forced(llm, SEQUENCES), on_fp32)
        one = distance(teacher_forced(llm, SEQUENCES), on_bf16)
        assert len(list(vllms_own_head(refit.model))) == (1 if tied and name != "llama3" else 2)
        (layers,) = llm.collective_rpc("flashrl_layers")
        assert layers["head_dtype"] == "bfloat16"
        llm.reset_prefix_cache()
        neither = distance(teacher_forced(llm, SEQUENCES), on_bf16)
        assert both < 0.5 * neither and both < 0.5 * one, (both, one, neither)


@torch.no_grad()
def trainer_log_probs(model: PreTrainedModel) -> list[torch.Tensor]:
    return [log_probs(model(input_ids=torch.tensor([ids])).logits[0, :-1], ids) for ids in SEQUENCES]


def distance(rollout: list[list[float]], trainer: list[torch.Tensor]) -> float:
    """Mean absolute difference of log-probs."""
    return (torch.cat([torch.tensor(r).double() for r in rollout]) - torch.cat(trainer)).abs().mean().item()


@pytest.mark.skipif(CUDA and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_gather_fp32_logits_and_give_the_log_probs_of_one(tmp_path, tied):
    trainer = model_with_large_logits("qwen2.5", tied, seed=0)
    save(trainer, tmp_path / "model")
    settings = {"precision": "int8", "fp32_lm_head": True}
    with engine(tmp_path / "model", settings) as llm:
        Refit(llm)(wire(trainer), 0)
        one = greedy(llm)
    with parallel_engine(tmp_path / "model", settings, 2) as llm:
        layers = llm.collective_rpc("flashrl_layers")
        assert [rank["head_dtype"] for rank in layers] == ["float32"] * 2
        assert {rank["quantized_layers"] for rank in layers} == {4 * LAYERS}
        update(llm, 2, wire(trainer), 0)
        two = greedy(llm)
    assert two[0] == one[0]
    assert (torch.tensor(two[1]) - torch.tensor(one[1])).abs().max() < 0.1, (
        "activations of a rank have scales of their own"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
def test_with_cuda_graphs_and_sleep_the_head_follows_its_refit(tmp_path, tied):
    assert CUDA
    # In a process of its own: vLLM takes one engine with sleep mode in each.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        dtype, before, after = pool.submit(sleep_and_wake, tmp_path, tied).result()
    assert dtype == "float32"
    assert after == before
