# SPDX-License-Identifier: Apache-2.0
"""Supervised warm-up: from random weights to a policy that is worth improving by RL.

It stops when the accuracy on a probe crosses a target, not after a fixed number of steps: when a small
transformer discovers how to align digits depends on its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flashrl_verl.errors import FlashRLError
from flashrl_verl.quickstart.task import SLIP_RATE, Problem, Split

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

TARGET = 0.45
"""Sampled probe accuracy at which to stop; the greedy one is a few points above it then. The sampled one decides
because it is an expectation over the policy and does not jump. A perfect adder with a slip rate of 0.6 would reach
0.70."""
MAX_STEPS = 1500
"""Give up after this many updates; 250 to 390 are needed."""
BATCH_SIZE = 64
PROBE_EVERY = 10
"""Updates between two probes."""
LR, LR_WARMUP_STEPS = 1.5e-3, 40
"""AdamW's rate, and the updates over which it rises linearly."""
IGNORE = -100
"""Label of a position that is not trained; `cross_entropy`'s own default."""


class Accuracy(NamedTuple):
    """How often a policy is right, as a share of the problems."""

    greedy: float
    """With the likeliest token at each position."""
    sampled: float
    """Expected at temperature 1: the mean probability of the right answer, end of turn included."""


def encode(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], answers: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """The chat prompt exactly as verl renders it, then the answer and the end of the turn, padded on the right.

    Args:
        tokenizer: the toy's.
        problems: B problems.
        answers: B answers to be given to them.

    Returns:
        tokens: [B, T] int64.
        labels: [B, T] int64, the token that follows each position where that belongs to the answer, else
            IGNORE.
    """
    import torch

    chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    ends = [tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id] for answer in answers]
    width = max(len(prompt) + len(end) for prompt, end in zip(prompts, ends, strict=True))
    tokens = torch.full((len(prompts), width), tokenizer.pad_token_id)
    labels = torch.full((len(prompts), width), IGNORE)
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        tokens[row, : len(prompt) + len(end)] = torch.tensor(prompt + end)
        labels[row, len(prompt) - 1 : len(prompt) - 1 + len(end)] = torch.tensor(end)
    return tokens, labels


def evaluate(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> Accuracy:
    """Accuracy on the problems, from one forward pass over their right answers.

    Greedy decoding yields the right answer if and only if each of its tokens is the argmax given the ones
    before it, so nothing needs to be generated.
    """
    import torch

    tokens, labels = encode(tokenizer, problems, [problem.answer for problem in problems])
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    ignored = labels == IGNORE
    greedy = ((logits.argmax(dim=-1) == labels) | ignored).all(dim=1)
    logp = logits.log_softmax(dim=-1).gather(-1, labels.masked_fill(ignored, 0)[..., None])[..., 0]
    sampled = logp.masked_fill(ignored, 0.0).sum(dim=1).exp()
    return Accuracy(greedy=greedy.float().mean().item(), sampled=sampled.mean().item())


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    *,
    seed: int,
    tell: Callable[[str], None] = lambda line: None,
) -> int:
    """Train `model` in place on the training problems until the probe's sampled accuracy reaches `TARGET`.

    Args:
        model: float32, on the CPU.
        tokenizer: its tokenizer.
        split: trains on `train`, stops by `probe`; `test` is not looked at.
        seed: order of the problems, and which labels slip, drawn anew for each use of a problem.
        tell: takes a line every 50 updates.

    Returns:
        The number of updates.

    Raises:
        FlashRLError: the target was not reached within `MAX_STEPS`.
    """
    from torch.nn.functional import cross_entropy
    from torch.nn.utils import clip_grad_norm_
    from torch.optim import AdamW

    rng = random.Random(seed)
    optimizer = AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(1, MAX_STEPS + 1):
        problems = rng.choices(split.train, k=BATCH_SIZE)
        answers = [problem.slip if rng.random() < SLIP_RATE else problem.answer for problem in problems]
        tokens, labels = encode(tokenizer, problems, answers)
        # Right padding needs no attention mask: under causal attention no labelled position sees it.
        logits = model(input_ids=tokens, use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / LR_WARMUP_STEPS)
        optimizer.step()
        model.zero_grad()
        if step % PROBE_EVERY == 0:
            accuracy = evaluate(model.eval(), tokenizer, split.probe)
            if accuracy.sampled >= TARGET:
                return step
            if step % 50 == 0:
                tell(f"supervised warm-up: update {step}, accuracy {accuracy.sampled:.2f} of {TARGET}")
            model.train()
    raise FlashRLError(
        f"The warm-up of the toy model reached a sampled probe accuracy of {accuracy.sampled:.2f} in {MAX_STEPS} "
        f"updates, short of {TARGET}. Try another seed: --seed {seed + 1}."
    )
