# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of ``flashrl bench mismatch``: the policy as verl's FSDP engine computes it, without FSDP.

Its FP32 masters are cast to BF16 for the forward pass (``MixedPrecisionPolicy(param_dtype=bfloat16)``), which runs
under ``torch.autocast`` to BF16; log-probs are verl's own function of the BF16 logits, called inside it. So here:
weights loaded in BF16, the same autocast, the same function. On CUDA that gives FP32 log-probs; on a CPU, where
autocast leaves ``log_softmax`` alone, BF16 ones. Attention is PyTorch's SDPA.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flashrl_verl.errors import ConfigError

_LOGIT_BYTES = 2 << 30
"""Room for the logits of one batch."""

InputHook = Callable[[str, torch.nn.Module, tuple], None]
"""(name of a module, the module, its positional inputs), called before the module runs; padding is left out by
``Trainer.real``."""


class Trainer:
    """A causal language model that gives log-probs of responses.

    Args:
        model: folder of the checkpoint.
        device: where it runs.
    """

    def __init__(self, model: Path, device: torch.device):
        from transformers import AutoModelForCausalLM

        try:
            loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model {model} cannot be loaded by transformers: {error}") from error
        self.module = loaded.to(device).eval()
        self.device = device
        self.log_prob_dtype = "none yet"
        """Of the log-probs, before they are compared."""
        self._mask: torch.Tensor | None = None

    @torch.no_grad()
    def log_probs(self, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token of the responses, given the prompts; one list a response."""
        from verl.utils.torch_functional import logprobs_from_logits

        found: list[list[float]] = [[] for _ in prompts]
        for batch in self._batches([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]):
            ids, mask = self._padded([[*prompts[i], *responses[i]] for i in batch])
            with self._autocast():
                logits = self._forward(ids, mask)
                values = logprobs_from_logits(logits[:, :-1], ids[:, 1:])
            self.log_prob_dtype = str(values.dtype).removeprefix("torch.")
            for row, i in zip(values.double().tolist(), batch, strict=True):
                start = len(prompts[i]) - 1  # position t predicts token t + 1
                found[i] = row[start : start + len(responses[i])]
        return found

    @torch.no_grad()
    def watch_inputs(self, sequences: list[list[int]], modules: dict[str, torch.nn.Module], hook: InputHook) -> None:
        """Run the sequences once, and call ``hook`` with what enters each of the modules."""
        ids, mask = self._padded(sequences)

        def before(name: str) -> Callable:
            def call(module: torch.nn.Module, arguments: tuple, keywords: dict) -> None:
                # Outside the autocast of the forward pass, which would round the hook's float32 products to BF16.
                with torch.autocast(self.device.type, enabled=False):
                    hook(name, module, (*arguments, *keywords.values()))

            return call

        handles = [m.register_forward_pre_hook(before(n), with_kwargs=True) for n, m in modules.items()]
        self._mask = mask
        try:
            with self._autocast():
                self._forward(ids, mask)
        finally:
            self._mask = None
            for handle in handles:
                handle.remove()

    def real(self, values: torch.Tensor) -> torch.Tensor:
        """Rows of a module's input [B, T, K] or [B * T, K] that are no padding: [tokens, K]. Only inside
        ``watch_inputs``."""
        return values.reshape(-1, values.shape[-1])[self._mask.flatten()]

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.module(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits

    def _autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(device_type=self.device.type, dtype=torch.bfloat16)

    def _padded(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, T], padded on the right, and the mask [B, T] bool of what is real."""
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        return ids.to(self.device), mask.to(self.device)

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Indices in batches of about equal lengths whose logits fit into ``_LOGIT_BYTES``."""
        tokens = max(1, _LOGIT_BYTES // (4 * self.module.config.vocab_size))
        batch: list[int] = []
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and (len(batch) + 1) * lengths[i] > tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch
