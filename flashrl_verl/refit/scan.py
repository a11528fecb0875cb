# SPDX-License-Identifier: Apache-2.0
"""One pass over tensors that says two things of each: its checksum, and whether it holds NaN or Inf."""

import torch

_PERIOD = 8191
"""Words are weighted by their position modulo this prime, which divides no layer's width: rows that changed places
differ."""

_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F80}
"""Bits of the exponent in an element's last 16-bit word; all ones mean Inf or NaN."""

_SLOTS = 1024
"""Results that are allocated together."""


class Scan:
    """Checksums and finiteness of tensors, read back together: on a GPU nothing waits until ``results``.

    The checksum is ``sum_i (1 + i mod 8191) * word_i`` over a tensor's 16-bit words, in int64 modulo 2^64. Equal bytes
    give equal sums; one changed BF16 value always changes it, and so do values that changed places. Not a cryptographic
    hash: it guards against dropped, stale and torn tensors, not against an adversary.
    """

    def __init__(self) -> None:
        self._slots: list[torch.Tensor] = []  # [_SLOTS, 2] int64 each
        self._found: list[tuple[int, bool] | tuple[torch.Tensor, int]] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Scan a tensor of any shape and dtype, once, on its own device. It is not kept."""
        flat = tensor.detach().contiguous().view(-1)
        even = flat.numel() * flat.element_size() % 2 == 0
        words = flat.view(torch.int16 if even else torch.uint8) if flat.numel() else flat.to(torch.int16)
        if not (words.is_cuda and even and flat.numel()):
            finite = not (flat.is_floating_point() and flat.numel()) or bool(
                torch.stack(flat.aminmax()).isfinite().all()
            )
            self._found.append((int(_checksum(words)), finite))
            return
        from flashrl_verl.refit.triton_scan import scan_on_gpu  # Triton is only where a GPU is

        row = len(self._found) % _SLOTS
        if not self._slots or row == 0 or self._slots[-1].device != flat.device:
            self._slots.append(torch.zeros(_SLOTS, 2, dtype=torch.int64, device=flat.device))
        scan_on_gpu(words, self._slots[-1][row], _PERIOD, _EXPONENTS.get(flat.dtype, 0), flat.element_size() // 2)
        self._found.append((self._slots[-1], row))

    def results(self) -> list[tuple[int, bool]]:
        """(checksum, whether all elements are finite) of each tensor, in the order they were added (synchronizes)."""
        on_host = {id(slots): slots.tolist() for slots in self._slots}

        def read(found: tuple) -> tuple[int, bool]:
            if not isinstance(found[0], torch.Tensor):
                return found
            total, bad = on_host[id(found[0])][found[1]]
            return total, not bad

        return [read(found) for found in self._found]


def _checksum(words: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, _PERIOD + 1, dtype=torch.int64, device=words.device)
    whole = words.numel() // _PERIOD * _PERIOD
    tail = words[whole:].to(torch.int64)
    return (words[:whole].view(-1, _PERIOD).sum(dim=0, dtype=torch.int64) * weights).sum() + (
        tail * weights[: len(tail)]
    ).sum()
