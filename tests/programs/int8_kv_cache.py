# SPDX-License-Identifier: Apache-2.0
"""What is seen of an engine with a given KV cache, in BF16 weights so that nothing else is rounded."""

import dataclasses
from pathlib import Path

import torch
from engines import Refit, engine, runner, teacher_forced
from tiny_models import CONFIGS, VOCAB, make, wire

LONG = 240
"""Tokens: prompts and responses span several pages and tiles of the kernel, and two steps of 256 tokens."""


@dataclasses.dataclass
class Seen:
    """Distances are means of k3 over tokens."""

    backends: set[str]
    dtypes: set[str]
    to_trainer: float
    responses: int
    """Tokens."""
    decoded_to_read: float
    fresh_tokens: int
    """Of the prompts, taken from the prefix cache when they are asked first: none may be."""
    cached_tokens: int
    cached_to_fresh: float
    before_update: float
    """From the engine with the first weights to a trainer with the second."""
    after_update: float
    """From the engine after sleep and an update to what it had with the same weights."""
    decoded_after_sleep: float
    """As ``decoded_to_read``."""


def k3(found: list[list[float]], expected: list[list[float]]) -> float:
    ratio = torch.tensor(sum(expected, [])) - torch.tensor(sum(found, []))
    return float((ratio.exp() - 1 - ratio).mean())


def trainers(model: torch.nn.Module, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probs of every token after the first, by the trainer's model in BF16."""
    ids = torch.tensor(sequences)
    with torch.no_grad():
        logits = model.to(torch.bfloat16)(input_ids=ids).logits.float().log_softmax(-1)
    model.float()
    return logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).tolist()


def sampled(llm, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]], int]:
    """Responses, their log-probs as sampled, and how many tokens of the prompts were in the prefix cache."""
    from vllm import SamplingParams

    counts = [min(30 + 7 * i, LONG - len(prompt)) for i, prompt in enumerate(prompts)]
    params = [
        SamplingParams(temperature=1.0, max_tokens=n, logprobs=0, ignore_eos=True, detokenize=False, seed=n)
        for n in counts
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    responses = [list(answer.token_ids) for answer in answers]
    log_probs = [[at[token].logprob for at, token in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
    return responses, log_probs, sum(o.num_cached_tokens or 0 for o in outputs)


def read(llm, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
    """The engine's log-probs of responses when it reads them as part of a prompt."""
    whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return [found[len(prompt) - 1 :] for found, prompt in zip(teacher_forced(llm, whole), prompts, strict=True)]


def seen(path: Path, family: str, kv_cache: str) -> Seen:
    """Start an engine, look, sample, put it to sleep, update it, look again."""
    # A random router has many near ties, and chooses other experts for a last bit, which moves a token's log-prob by
    # tenths. It is not what is looked at here, so every token has all experts.
    every_expert = {"num_experts_per_tok": CONFIGS[family].num_experts} if "moe" in family else {}
    model, other = (make(family, seed=seed, **every_expert) for seed in (6, 7))
    model.config.save_pretrained(path)
    generator = torch.Generator().manual_seed(2)
    sequences = torch.randint(3, VOCAB, (16, LONG), generator=generator).tolist()
    prompts = [sequence[: 20 + 9 * i] for i, sequence in enumerate(sequences)]
    settings = {"precision": "bf16", "kv_cache": kv_cache}
    arguments = dict(compiled=True, enable_sleep_mode=True, max_model_len=256, num_gpu_blocks_override=512)
    with engine(path, settings, **arguments) as llm:
        refit = Refit(llm)
        refit(wire(model), step=0)
        layers = [m for m in runner(llm).model.modules() if hasattr(m, "attn_backend")]
        first = teacher_forced(llm, sequences)
        llm.reset_prefix_cache()  # it holds the prompts, which the sequences begin with
        responses, log_probs, fresh = sampled(llm, prompts)
        again, cached_log_probs, cached = sampled(llm, prompts)
        assert len(layers) > 0
        same = [(a, b) for r, s, a, b in zip(responses, again, log_probs, cached_log_probs, strict=True) if r == s]
        result = Seen(
            backends={layer.attn_backend.get_name() for layer in layers},
            dtypes={str(cache.dtype) for cache in runner(llm).kv_caches},
            to_trainer=k3(first, trainers(model, sequences)),
            responses=sum(map(len, responses)),
            decoded_to_read=k3(log_probs, read(llm, prompts, responses)),
            fresh_tokens=fresh,
            cached_tokens=cached,
            cached_to_fresh=k3([b for _, b in same], [a for a, _ in same]) if same else float("nan"),
            before_update=k3(first, trainers(other, sequences)),
            after_update=float("nan"),
            decoded_after_sleep=float("nan"),
        )
        refit(wire(other), step=1)
        expected = teacher_forced(llm, sequences)
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        refit(wire(other), step=2)
        llm.wake_up(tags=["kv_cache"])
        llm.reset_prefix_cache()
        responses, log_probs, _ = sampled(llm, prompts)  # its CUDA graphs were captured before it slept
        return dataclasses.replace(
            result,
            after_update=k3(teacher_forced(llm, sequences), expected),
            decoded_after_sleep=k3(log_probs, read(llm, prompts, responses)),
        )
