# SPDX-License-Identifier: Apache-2.0
"""Checksums of tensors, and which tensors hold NaN or Inf."""

import torch

_PERIOD = 8191
"""Words are weighted by their position modulo this prime, which divides no layer's width: neighbouring rows that
changed places differ."""


class Checksums:
    """Checksums of tensors, read back together: on a GPU nothing waits until ``results``.

    A checksum is ``sum_i (1 + i mod 8191) * word_i`` over a tensor's 16-bit words, in int64 modulo 2^64. Equal bytes
    give equal sums; one changed BF16 value always changes it, and so do two that changed places, unless these are a
    multiple of 8191 apart. Not a cryptographic hash: it guards against dropped, stale and torn tensors, not against an
    adversary.
    """

    def __init__(self) -> None:
        self._found: list[int | None] = []  # None: still on the GPU
        self._on_gpu: list[torch.Tensor] = []  # [n] int64 each

    def add(self, *tensors: torch.Tensor) -> None:
        """Add tensors of any shape and dtype. They are not kept, and those on a GPU take one launch together."""
        launched = []
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1)
            even = flat.nbytes % 2 == 0
            words = flat.view(torch.int16 if even else torch.uint8) if flat.numel() else flat.to(torch.int16)
            if words.is_cuda and even and flat.numel():
                launched.append(words)
                self._found.append(None)
            else:
                self._found.append(int(_checksum(words)))
        if launched:
            from flashrl_verl.refit.triton_scan import checksums_on_gpu  # Triton is only where a GPU is

            self._on_gpu.append(checksums_on_gpu(launched, _PERIOD))

    def results(self) -> list[int]:
        """Each tensor's, in the order they were added (synchronizes)."""
        if self._on_gpu:
            on_gpu = iter(torch.cat(self._on_gpu).tolist())
            self._found = [next(on_gpu) if total is None else total for total in self._found]
            self._on_gpu = []
        return self._found


def _checksum(words: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, _PERIOD + 1, dtype=torch.int64, device=words.device)
    whole = words.numel() // _PERIOD * _PERIOD
    tail = words[whole:].to(torch.int64)
    return (words[:whole].view(-1, _PERIOD).sum(dim=0, dtype=torch.int64) * weights).sum() + (
        tail * weights[: len(tail)]
    ).sum()


def non_finite(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of the floating-point tensors that hold NaN or Inf: a launch or two for each dtype, one synchronization.

    Args:
        tensors: of more than a byte an element and of any shape; empty ones hold nothing.
    """
    alike: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
    found = []
    for named in alike.values():
        largest = torch.stack(torch._foreach_norm(list(named.values()), float("inf")))
        found += [name for name, finite in zip(named, largest.isfinite().tolist(), strict=True) if not finite]
    return found
