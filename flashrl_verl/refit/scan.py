# SPDX-License-Identifier: Apache-2.0
"""One pass over tensors that says two things of each: its checksum, and whether it holds NaN or Inf; or the latter."""

import torch

_PERIOD = 8191
"""Words are weighted by their position modulo this prime, which divides no layer's width: neighbouring rows that
changed places differ."""

_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F80}
"""Bits of the exponent in an element's last 16-bit word; all ones mean Inf or NaN."""


class Scan:
    """Checksums and finiteness of tensors, read back together: on a GPU nothing waits until ``results``.

    The checksum is ``sum_i (1 + i mod 8191) * word_i`` over a tensor's 16-bit words, in int64 modulo 2^64. Equal bytes
    give equal sums; one changed BF16 value always changes it, and so do two that changed places, unless these are a
    multiple of 8191 apart. Not a cryptographic hash: it guards against dropped, stale and torn tensors, not against an
    adversary.
    """

    def __init__(self) -> None:
        self._found: list[tuple[int, bool] | None] = []  # None: still on the GPU
        self._places: list[int] = []  # in _found, of what is still on the GPU
        self._on_gpu: list[torch.Tensor] = []  # [n, 2] int64: checksum, and 1 where not finite

    def add(self, *tensors: torch.Tensor) -> None:
        """Scan tensors of any shape and dtype. They are not kept, and those on a GPU take one launch for each dtype."""
        launches: dict[torch.dtype, list[torch.Tensor]] = {}
        places: dict[torch.dtype, list[int]] = {}
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1)
            even = flat.nbytes % 2 == 0
            words = flat.view(torch.int16 if even else torch.uint8) if flat.numel() else flat.to(torch.int16)
            if words.is_cuda and even and flat.numel():
                launches.setdefault(flat.dtype, []).append(words)
                places.setdefault(flat.dtype, []).append(len(self._found))
                self._found.append(None)
            else:
                looked_at = flat.is_floating_point() and flat.numel()
                finite = not looked_at or bool(torch.stack(flat.aminmax()).isfinite().all())
                self._found.append((int(_checksum(words)), finite))
        for dtype, words in launches.items():
            from flashrl_verl.refit.triton_scan import scan_on_gpu  # Triton is only where a GPU is

            out = torch.zeros(len(words), 2, dtype=torch.int64, device=words[0].device)
            scan_on_gpu(words, out, _PERIOD, _EXPONENTS.get(dtype, 0), dtype.itemsize // 2)
            self._places += places[dtype]
            self._on_gpu.append(out)

    def results(self) -> list[tuple[int, bool]]:
        """(checksum, whether all elements are finite) of each tensor, in the order they were added (synchronizes)."""
        if self._on_gpu:
            for place, (total, bad) in zip(self._places, torch.cat(self._on_gpu).tolist(), strict=True):
                self._found[place] = total, not bad
            self._places, self._on_gpu = [], []
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
