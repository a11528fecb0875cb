# SPDX-License-Identifier: Apache-2.0
"""Supervised warm-up: from random weights to a policy that is worth improving by RL.

It stops when the accuracy on a probe crosses a target, not after a fixed number of steps: when a small
transformer discovers how to align digits depends on its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashrl_verl.errors import FlashRLError
from flashrl_verl.quickstart.task import Problem, Split

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

IGNORE = -100
"""Label of a position that is not trained; `cross_entropy`'s own default."""


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """How the warm-up is run."""

    target_accuracy: float = 0.45
    """Sampled probe accuracy at which to stop; the greedy one is a few points above it then. The sampled one
    decides because it is an expectation over the policy and does not jump. A perfect adder with a slip rate
    of 0.6 would reach 0.70."""
    max_steps: int = 1500
    """Give up after this many updates; 280 to 390 are needed."""
    batch_size: int = 64
    """Problems an update."""
    probe_every: int = 10
    """Updates between two probes."""
    lr: float = 1.5e-3
    """AdamW's rate."""
    lr_warmup_steps: int = 40
    """Updates over which the rate rises linearly."""
    max_grad_norm: float = 1.0
    """Clip of the gradient's L2 norm."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How often a policy is right, as a share of the problems."""

    greedy: float
    """With the likeliest token at each position."""
    sampled: float
    """Expected at temperature 1: the mean probability of the right answer, end of turn included."""


class Encoder:
    """Problems to token tensors: the chat prompt, then the answer and the end of the turn, padded on the
    right."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._prompts: dict[str, list[int]] = {}

    def prompt_ids(self, problem: Problem) -> list[int]:
        """The prompt's tokens, generation prompt included, exactly as verl renders them."""
        if problem.prompt not in self._prompts:
            message = [{"role": "user", "content": problem.prompt}]
            text = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            self._prompts[problem.prompt] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._prompts[problem.prompt]

    def batch(self, problems: Sequence[Problem], answers: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokens and labels.

        Args:
            problems: B problems.
            answers: B answers to be given to them.

        Returns:
            tokens: [B, T] int64.
            labels: [B, T] int64, the token that follows each position where that belongs to the answer, else
                IGNORE.
        """
        import torch

        rows, starts = [], []
        for problem, answer in zip(problems, answers, strict=True):
            prompt = self.prompt_ids(problem)
            rows.append(
                prompt + self._tokenizer.encode(answer, add_special_tokens=False) + [self._tokenizer.eos_token_id]
            )
            starts.append(len(prompt) - 1)
        width = max(map(len, rows))
        tokens = torch.full((len(rows), width), self._tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), IGNORE)
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            tokens[i, : len(row)] = torch.tensor(row)
            labels[i, start : len(row) - 1] = torch.tensor(row[start + 1 :])
        return tokens, labels


def evaluate(model: Qwen2ForCausalLM, encoder: Encoder, problems: Sequence[Problem]) -> Accuracy:
    """Accuracy on the problems, from one forward pass over their right answers.

    Greedy decoding yields the right answer if and only if each of its tokens is the argmax given the ones
    before it, so nothing needs to be generated.
    """
    import torch

    tokens, labels = encoder.batch(problems, [problem.answer for problem in problems])
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
    slip_rate: float,
    config: WarmupConfig,
    seed: int,
    on_probe: Callable[[int, Accuracy], None] | None = None,
) -> int:
    """Train `model` in place on the training problems until the probe's sampled accuracy reaches the target.

    Args:
        model: float32, on the CPU.
        tokenizer: its tokenizer.
        split: trains on `train`, stops by `probe`; `test` is not looked at.
        slip_rate: probability of each slip of a label, drawn anew for each use of a problem.
        config: rate and limits.
        seed: order of the problems and draws of the labels.
        on_probe: called after each probe with the number of updates and the accuracy.

    Returns:
        The number of updates.

    Raises:
        FlashRLError: the target was not reached within `config.max_steps`.
    """
    from torch.nn.functional import cross_entropy
    from torch.nn.utils import clip_grad_norm_
    from torch.optim import AdamW

    rng, encoder = random.Random(seed), Encoder(tokenizer)
    optimizer = AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(1, config.max_steps + 1):
        problems = rng.choices(split.train, k=config.batch_size)
        answers = [problem.worked(rng, slip_rate) for problem in problems]
        tokens, labels = encoder.batch(problems, answers)
        # Right padding needs no attention mask: under causal attention no labelled position sees it.
        logits = model(input_ids=tokens, use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE).backward()
        clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / config.lr_warmup_steps)
        optimizer.step()
        model.zero_grad()
        if step % config.probe_every == 0:
            accuracy = evaluate(model.eval(), encoder, split.probe)
            model.train()
            if on_probe:
                on_probe(step, accuracy)
            if accuracy.sampled >= config.target_accuracy:
                model.eval()
                return step
    raise FlashRLError(
        f"The warm-up of the toy model reached a sampled probe accuracy of {accuracy.sampled:.2f} in "
        f"{config.max_steps} updates, short of {config.target_accuracy:.2f}. "
        f"Try another seed: --seed {seed + 1}."
    )
