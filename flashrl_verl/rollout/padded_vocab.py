# SPDX-License-Identifier: Apache-2.0
"""How much probability the model puts on tokens the tokenizer does not have.

Checkpoints pad the vocabulary (Qwen2.5: 152064 rows, about 151.7k tokens). verl masks those logits in the rollout only,
so every rollout log-prob is larger than the trainer's by ``-log(1 - mass)``: nothing for trained models, a bias for
others.
"""

from types import MethodType

import torch

_SAMPLED_CALLS = 8
"""Forward passes measured after each weight update; a soft-max over the vocabulary is too dear for every decode
step."""

_SAMPLED_ROWS = 64
"""Tokens of a forward pass that are measured: 64 x 152064 FP32 logits are 39 MB, outside vLLM's memory profile."""


class PaddedVocabularyMeter:
    """Measures the mass on columns ``[vocab_size, ...)`` of the logits before they are masked."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._calls = 0
        self._largest: torch.Tensor | None = None

    @classmethod
    def attach(cls, model: torch.nn.Module, rows: int, vocab_size: int) -> "PaddedVocabularyMeter | None":
        """Wrap ``model.compute_logits``; None when the vocabulary is not padded.

        Args:
            model: a vLLM model.
            rows: the model's vocabulary with its padding.
            vocab_size: ``len(tokenizer)``.
        """
        if rows <= vocab_size:
            return None
        meter = cls(vocab_size)
        compute_logits = model.compute_logits

        def measured(self, *args, **kwargs):
            logits = compute_logits(*args, **kwargs)
            meter.observe(logits)
            return logits

        model.compute_logits = MethodType(measured, model)
        return meter

    def reset(self) -> None:
        self._calls, self._largest = 0, None

    def observe(self, logits: torch.Tensor | None) -> None:
        """Args: logits [tokens, vocabulary] of one forward pass, or None on ranks that do not gather them."""
        if logits is None or logits.numel() == 0 or self._calls >= _SAMPLED_CALLS:
            return
        self._calls += 1
        logits = logits[:_SAMPLED_ROWS].float()
        mass = (logits[:, self.vocab_size :].logsumexp(dim=-1) - logits.logsumexp(dim=-1)).exp().mean()
        self._largest = mass if self._largest is None else torch.maximum(self._largest, mass)

    def mass(self) -> float:
        return 0.0 if self._largest is None else float(self._largest)
