# SPDX-License-Identifier: Apache-2.0
"""The refit receipt: proof that the engine holds the weights of this step, tensor by tensor.

Health metrics cannot prove it: at a learning rate of 1e-6 a missed update changes the mismatch KL by nothing visible. So
both sides write a manifest of what passed, names, shapes and sampled checksums under one step id, and the driver compares
them after every update.
"""

import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from flashrl_verl.errors import RefitError

_PERIOD = 8191
"""Words are weighted by their position modulo this prime, which divides no layer's width: rows that changed places differ."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Weighted sum of a tensor's 16-bit words, ``sum_i (1 + i mod 8191) * word_i`` in int64: [], no synchronization.

    Equal bytes give equal sums; one changed BF16 value always changes it, and so do values that changed places. Not a
    cryptographic hash: it guards against dropped, stale and torn updates, not against an adversary.

    Args:
        tensor: any shape and dtype; read once, on its own device.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(torch.int16 if flat.numel() * flat.element_size() % 2 == 0 else torch.uint8)
    if words.is_cuda and words.dtype == torch.int16:
        from flashrl_verl.rollout import triton_scan  # Triton is only where a GPU is

        return triton_scan.checksum(words, _PERIOD)
    columns = torch.arange(1, _PERIOD + 1, dtype=torch.int64, device=words.device)
    whole = words.numel() // _PERIOD * _PERIOD
    tail = words[whole:].to(torch.int64)
    return (words[:whole].view(-1, _PERIOD).sum(dim=0, dtype=torch.int64) * columns).sum() + (tail * columns[: len(tail)]).sum()


def gather(scalars: list[torch.Tensor]) -> torch.Tensor:
    """0-dimensional tensors as one: [n], without synchronization where they share a device, on the host where they do not
    (offloaded shards)."""
    if not scalars:
        return torch.empty(0)
    if len({scalar.device for scalar in scalars}) > 1:
        scalars = [scalar.cpu() for scalar in scalars]
    return torch.stack(scalars)


def to_host(scalars: list[torch.Tensor]) -> list:
    """Values of 0-dimensional tensors: one copy when they share a device, one each where they do not."""
    return gather(scalars).tolist()


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether a non-empty floating tensor holds neither NaN nor Inf: [] bool, no synchronization.

    A sum would overflow to Inf on healthy BF16 tensors; minimum and maximum propagate NaN and see Inf.
    """
    if tensor.is_cuda:
        from flashrl_verl.rollout import triton_scan

        if triton_scan.has_fast_finite(tensor):
            return triton_scan.all_finite(tensor)
    return torch.stack(tensor.aminmax()).isfinite().all()


def is_sampled(name: str, step: int, stride: int) -> bool:
    """Whether ``name``'s checksum is taken at ``step``: one tensor in ``stride``, another set every step, stable across
    processes (Python's own ``hash`` is salted per process)."""
    return (_number(name) + step) % stride == 0


@functools.cache
def _number(name: str) -> int:
    return zlib.crc32(name.encode())  # a model's names, once


def stride_for(tensors: int, sample: int) -> int:
    """Return the stride that samples about ``sample`` of ``tensors`` (-1: all; unknown count 0: all)."""
    if sample < 0 or tensors == 0:
        return 1
    return max(1, tensors // sample)


_SMALL_ELEMENTS = 65536
"""Tensors of at most this size are checked for NaN and Inf together."""


@dataclasses.dataclass
class _FiniteCheck:
    """One or many tensors, whether all of them are finite ([] bool), and copies of them where they are many."""

    names: list[str]
    finite: torch.Tensor
    parts: Sequence[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Passed:
    """Names, shapes and dtypes of tensors, without the tensors."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    num_bytes: int
    numbers: np.ndarray
    """[tensors] int64: what ``is_sampled`` makes of each name, in the order they passed."""
    repeated: tuple[str, ...] = ()
    """Names that are there more than once."""

    def sampled(self, step: int, stride: int) -> list[int]:
        """Indices of the tensors that ``is_sampled``; asked one by one, thousands of experts keep the host busy for long."""
        return np.flatnonzero((self.numbers + step) % stride == 0).tolist()

    @classmethod
    def of(cls, weights: Sequence[tuple[str, torch.Tensor]]) -> "Passed":
        shapes, dtypes = {n: tuple(t.shape) for n, t in weights}, {n: t.dtype for n, t in weights}
        names = [name for name, _ in weights]
        repeated = tuple({n for n in names if names.count(n) > 1}) if len(shapes) < len(names) else ()
        numbers = np.array([_number(name) for name in names], np.int64)
        return cls(shapes, dtypes, sum(t.nbytes for _, t in weights), numbers, repeated)


@dataclasses.dataclass
class Manifest:
    """What one side saw of one weight update."""

    step: int
    stride: int
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    repeated: list[str] = dataclasses.field(default_factory=list)
    """Names that passed more than once."""
    digest: str = ""
    _sums: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    _finite: list["_FiniteCheck"] = dataclasses.field(default_factory=list)
    _gathered_sums: torch.Tensor | None = None

    def samples(self, name: str) -> bool:
        """Whether this update takes ``name``'s checksum."""
        return is_sampled(name, self.step, self.stride)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Record one tensor (any shape, a 2- or 4-byte dtype) as it passes; nothing is copied to the host yet."""
        if name in self.shapes:
            self.repeated.append(name)
        self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype
        self.num_bytes += tensor.nbytes
        if self.samples(name):
            self.add_sum(name, tensor)

    def add_passed(self, passed: Passed) -> None:
        """Record many tensors at once, without the checksums of those it ``samples``: ``add_sum`` them."""
        self.repeated += passed.repeated
        if not self.shapes.keys().isdisjoint(passed.shapes):
            self.repeated += [name for name in passed.shapes if name in self.shapes]
        self.shapes.update(passed.shapes)
        self.dtypes.update(passed.dtypes)
        self.num_bytes += passed.num_bytes

    def add_sum(self, name: str, tensor: torch.Tensor) -> None:
        """Take the checksum of a tensor that passed; nothing is copied to the host yet."""
        self._sums[name] = checksum(tensor)

    def check_finite(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Look for NaN and Inf in tensors, which are read once more; ``non_finite`` tells."""
        small: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in weights:
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            if tensor.numel() <= _SMALL_ELEMENTS:
                small.setdefault(tensor.dtype, []).append((name, tensor.reshape(-1)))
            else:
                self._finite.append(_FiniteCheck([name], all_finite(tensor), []))
        for pairs in small.values():  # a kernel for each of hundreds of them takes longer than all large ones
            together = torch.cat([tensor for _, tensor in pairs])
            parts = together.split([tensor.numel() for _, tensor in pairs])
            self._finite.append(_FiniteCheck([name for name, _ in pairs], all_finite(together), parts))

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``weights`` unchanged, recording each."""
        for name, tensor in weights:
            self.add(name, tensor)
            yield name, tensor

    def drop_tensors(self) -> None:
        """Free what is kept for ``non_finite`` and ``receipt``."""
        self._sums, self._gathered_sums, self._finite = {}, None, []

    def complete(self) -> None:
        """Say that everything has passed: what ``receipt`` asks the device for is enqueued, and nothing waits."""
        self._gathered_sums = gather(list(self._sums.values()))

    def non_finite(self) -> list[str]:
        """Names of the tensors given to ``check_finite`` that hold NaN or Inf (synchronizes)."""
        flags = to_host([check.finite for check in self._finite])
        bad: list[str] = []
        for check, finite in zip(self._finite, flags, strict=True):
            if not finite:
                bad += [n for n, part in zip(check.names, check.parts, strict=False) if not all_finite(part)] or check.names
        return bad

    def receipt(self, previous: "Manifest | None" = None) -> dict:
        """Plain data for the driver: step, number of tensors, bytes, a digest of names, shapes and dtypes, the checksums.

        Args:
            previous: the manifest of an earlier update, whose digest is taken over if everything in it is the same.
        """
        if self._gathered_sums is None:
            self.complete()
        sums = self._gathered_sums.tolist()
        if previous is not None and previous.shapes == self.shapes and previous.dtypes == self.dtypes:
            self.digest = previous.digest
        else:
            lines = "\n".join(f"{name} {shape} {self.dtypes[name]}" for name, shape in sorted(self.shapes.items()))
            self.digest = hashlib.sha256(lines.encode()).hexdigest()
        return {
            "step": self.step,
            "tensors": len(self.shapes),
            "bytes": self.num_bytes,
            "digest": self.digest,
            "checksums": dict(zip(self._sums, sums, strict=True)),
        }


def verify_ranks(ranks: Sequence[dict], held: Sequence[Sequence[dict]], step: int) -> None:
    """Compare what every trainer rank sent with what the engine worker beside it holds.

    Args:
        ranks: ``FlashRLWorker.flashrl_refit_report`` of every trainer rank.
        held: the receipts of every replica's engine workers.
        step: the trainer's global step.

    Raises:
        RefitError: two receipts differ, or a worker has no trainer rank that sends to it.
    """
    for rank in ranks:
        replica, position = rank["replica"], rank["rank_in_replica"]
        verify_receipts(rank["sent"], held[replica][position], step, f"rollout replica {replica}, rank {position}")
    served = {(rank["replica"], rank["rank_in_replica"]) for rank in ranks}
    workers = [(replica, position) for replica, receipts in enumerate(held) for position in range(len(receipts))]
    unserved = [f"replica {replica}, rank {position}" for replica, position in workers if (replica, position) not in served]
    if unserved:
        raise RefitError(f"step {step}: no trainer rank sends to the rollout's {'; '.join(unserved)}")


def verify_receipts(sent: dict, received: dict, step: int, where: str) -> None:
    """Compare the trainer's receipt with the engine's.

    Args:
        sent: ``Manifest.receipt()`` of the trainer rank.
        received: the engine worker's.
        step: the trainer's global step; both must carry it.
        where: names the engine worker in the message.

    Raises:
        RefitError: naming the step and, where one is at fault, the tensors.
    """
    for side, receipt in (("trainer sent", sent), ("rollout engine holds", received)):
        if receipt.get("step") != step:
            raise RefitError(
                f"{where}: the {side} the weights of step {receipt.get('step')}, but the trainer is at step {step}: "
                "a weight update was dropped; the responses it would sample are stale"
            )
    if not sent["checksums"]:
        raise RefitError(f"{where}: no tensor of step {step} was sampled, so nothing is proved; raise flashrl.receipt_tensors")
    wrong = [n for n, value in sent["checksums"].items() if received["checksums"].get(n) != value]
    if wrong:
        raise RefitError(
            f"{where}: at step {step} the rollout engine does not hold what the trainer sent for {len(wrong)} of "
            f"{len(sent['checksums'])} sampled tensors: {', '.join(sorted(wrong)[:8])}"
        )
    if sent["digest"] != received["digest"]:
        raise RefitError(
            f"{where}: at step {step} the trainer sent {sent['tensors']} tensors ({sent['bytes']} bytes) and the rollout "
            f"engine took {received['tensors']} ({received['bytes']} bytes), or their shapes or dtypes differ"
        )
