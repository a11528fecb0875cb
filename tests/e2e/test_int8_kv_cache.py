# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with our attention over INT8 keys and values: CUDA graphs, prompts in pieces, prefix caching,
sleep. Weights are BF16, so that nothing else is rounded."""

from pathlib import Path

import pytest
import torch
from engines import Refit, engine, in_own_process, runner, teacher_forced
from tiny_models import CONFIGS, VOCAB, log_probs, make, wire

pytestmark = pytest.mark.gpu

LONG = 240
"""Tokens: prompts and responses span several pages and tiles of the kernel, and two steps of 256 tokens."""

_GENERATOR = torch.Generator().manual_seed(2)
SEQUENCES = torch.randint(3, VOCAB, (16, LONG), generator=_GENERATOR).tolist()
PROMPTS = [sequence[: 20 + 9 * i] for i, sequence in enumerate(SEQUENCES)]


def k3(found: list[list[float]], expected: list[list[float]]) -> float:
    """Mean over tokens."""
    ratio = torch.tensor(sum(expected, [])) - torch.tensor(sum(found, []))
    return float((ratio.exp() - 1 - ratio).mean())


def sampled(llm) -> tuple[list[list[int]], list[list[float]], int]:
    """Responses, their log-probs as sampled, and how many tokens of the prompts were in the prefix cache."""
    from vllm import SamplingParams

    counts = [min(30 + 7 * i, LONG - len(prompt)) for i, prompt in enumerate(PROMPTS)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=n, logprobs=0, ignore_eos=True, detokenize=False, seed=n)
        for n in counts
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    found = [[at[token].logprob for at, token in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
    return [list(a.token_ids) for a in answers], found, sum(o.num_cached_tokens or 0 for o in outputs)


def read(llm, responses: list[list[int]]) -> list[list[float]]:
    """The engine's log-probs of responses when it reads them as part of a prompt."""
    whole = [prompt + response for prompt, response in zip(PROMPTS, responses, strict=True)]
    return [found[len(prompt) - 1 :] for found, prompt in zip(teacher_forced(llm, whole), PROMPTS, strict=True)]


BIASED = "qwen2.5 with two biases of 60 a head"
"""A hundred times what differs between its tokens, which one scale a token would round away: emulated on a CPU, keys as
they come are 1.8e-3 from the trainer, equalized 3.4e-4, a BF16 cache 2.6e-4. In Qwen2.5 itself biases are larger."""


def same_k3(family: str) -> float:
    """Below it two ways to one token agree. BF16 rounds a key of 60 to a quarter before any cache has it."""
    return 4e-4 if family == BIASED else 1e-4


def graphs_with_prompts(llm) -> list[bool] | None:
    """Of every step to come that has a CUDA graph and reads prompts, whether other sequences decode in it; None: vLLM
    has no such graphs."""
    from flashrl_verl.attention import graphs_hold_prompts
    from flashrl_verl.attention.backend import MetadataBuilder

    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name
    assert mode == ("FULL" if graphs_hold_prompts() else "FULL_AND_PIECEWISE")
    if not graphs_hold_prompts():
        return None
    found, build = [], MetadataBuilder.build

    def looked_at(self, common_prefix_len, common_attn_metadata, fast_build=False):
        step = build(self, common_prefix_len, common_attn_metadata, fast_build)
        if not step.prefills and common_attn_metadata.max_query_len > 1:
            found.append(1 in common_attn_metadata.query_start_loc_cpu.diff())
        return step

    MetadataBuilder.build = looked_at
    return found


def trainers(family: str) -> list[torch.nn.Module]:
    # A random router has many near ties, and chooses other experts for a last bit, which moves a token's log-prob by
    # tenths. It is not what is looked at here, so every token has all experts.
    every_expert = {"num_experts_per_tok": CONFIGS[family].num_experts} if "moe" in family else {}
    models = [make(family.split()[0], seed, **every_expert) for seed in (6, 7)]
    with torch.no_grad():
        for name, parameter in [pair for model in models for pair in model.named_parameters()]:
            if family == BIASED and name.endswith("k_proj.bias"):
                parameter.view(models[0].config.num_key_value_heads, -1)[:, :2] += 60
    return models


def start(path: Path, family: str, kv_cache: str, **arguments):
    trainers(family)[0].config.save_pretrained(path)
    arguments |= dict(compiled=True, enable_sleep_mode=True, max_model_len=256, num_gpu_blocks_override=512)
    # Larger batches have no CUDA graph: prompts are read.
    arguments |= dict(max_num_seqs=32, compilation_config={"max_cudagraph_capture_size": 192})
    return engine(path, {"precision": "bf16", "kv_cache": kv_cache}, **arguments)


def with_a_bf16_cache(path: Path, family: str) -> float:
    """k3 to the trainer."""
    model, _ = trainers(family)
    with start(path, family, "auto") as llm:
        Refit(llm)(wire(model), step=0)
        return k3(teacher_forced(llm, SEQUENCES), log_probs(model, SEQUENCES))


def with_an_int8_cache(path: Path, family: str, backend: str) -> float:
    """k3 to the trainer, after a look at all that an engine does with its cache."""
    model, other = trainers(family)
    same_token = same_k3(family)
    with start(path, family, "int8_per_token_head", attention_backend=backend) as llm:
        layers = [m for m in runner(llm).model.modules() if hasattr(m, "attn_backend")]
        assert {layer.attn_backend.get_name() for layer in layers} == {backend}
        assert {cache.dtype for cache in runner(llm).kv_caches} == {torch.int8}
        in_graphs = graphs_with_prompts(llm) if backend == "CUSTOM" else None
        refit = Refit(llm)
        refit(wire(model), step=0)
        first = teacher_forced(llm, SEQUENCES)

        llm.reset_prefix_cache()  # it holds the prompts, which the sequences begin with
        responses, decoded, fresh_tokens = sampled(llm)
        again, from_cache, cached_tokens = sampled(llm)
        assert fresh_tokens == 0 < cached_tokens
        assert in_graphs is None or any(in_graphs)
        same = [i for i, response in enumerate(responses) if again[i] == response]
        assert same and k3([from_cache[i] for i in same], [decoded[i] for i in same]) < same_token
        assert 0 < k3(decoded, read(llm, responses)) < same_token, "decoded or read, a token has one log-prob"

        refit(wire(other), step=1)
        updated = teacher_forced(llm, SEQUENCES)
        assert k3(first, log_probs(other, SEQUENCES)) > 1e-4, "the update makes a difference"
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        refit(wire(other), step=2)
        llm.wake_up(tags=["kv_cache"])
        llm.reset_prefix_cache()
        responses, decoded, _ = sampled(llm)  # its CUDA graphs were captured before it slept
        assert k3(teacher_forced(llm, SEQUENCES), updated) < same_token
        assert 0 < k3(decoded, read(llm, responses)) < same_token
        return k3(first, log_probs(model, SEQUENCES))


FAMILIES = "qwen2.5", BIASED, "qwen3", "llama3", "qwen3-moe"


@pytest.mark.parametrize(("family", "backend"), [*((family, "CUSTOM") for family in FAMILIES), (BIASED, "TRITON_ATTN")])
def test_an_int8_cache_is_as_near_the_trainer_as_a_bf16_one_and_serves_prefixes_updates_and_sleep(
    tmp_path, family, backend
):
    int8 = in_own_process(with_an_int8_cache, tmp_path, family, backend)  # as vLLM's sleep wants it
    bf16 = in_own_process(with_a_bf16_cache, tmp_path, family)
    assert 0 < int8 <= bf16 + (same_k3(family) if family == BIASED else 2e-4)
