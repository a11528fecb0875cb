# SPDX-License-Identifier: Apache-2.0
"""The refit receipt: proof that what the trainer sent at this step is what reached the engine, tensor by tensor.

Health metrics cannot prove it: at a learning rate of 1e-6 a missed update changes the mismatch KL by nothing visible.
So both sides write down the name, shape, dtype and checksum of every tensor that passes, and the driver compares a
digest of that after every update. It asks for the names where two digests differ.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

import torch

from flashrl_verl.errors import RefitError, listed
from flashrl_verl.refit.scan import Checksums

_TOGETHER = 64 << 20
"""Bytes of tensors that the sender keeps for one launch. An expert's has some 3 MB, and a model has thousands."""


class Manifest:
    """What one side saw of one weight update. Args: step: the trainer's global step."""

    def __init__(self, step: int):
        self.step = step
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        """Name -> shape and dtype."""
        self.repeated: list[str] = []
        """Names that passed more than once."""
        self.num_bytes = 0
        self._checksums = Checksums()

    def add(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record tensors as they pass. On a GPU nothing is copied to the host yet."""
        fresh = []
        for name, tensor in weights:
            if name in self.tensors:
                self.repeated.append(name)
                continue
            self.tensors[name] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            self.num_bytes += tensor.nbytes
            fresh.append(tensor)
        self._checksums.add(*fresh)

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``weights`` unchanged, recording each. Of many small ones some are kept for a moment, so that a GPU
        takes one launch for them."""
        waiting: list[tuple[str, torch.Tensor]] = []
        for name, tensor in weights:
            yield name, tensor
            waiting.append((name, tensor))
            if sum(tensor.nbytes for _, tensor in waiting) >= _TOGETHER:
                self.add(waiting)
                waiting = []
        self.add(waiting)

    def receipt(self) -> dict:
        """Plain data: ``step``, ``bytes``, ``sum``: one number for "the same weights", ``count`` of tensors, ``digest``
        of all that ``tensors`` says: name -> dtype, shape and checksum in words (which every serializer leaves as they
        are)."""
        sums = self._checksums.results()
        tensors = {
            name: f"{dtype} {list(shape)} checksum {total}"
            for (name, (shape, dtype)), total in zip(self.tensors.items(), sums, strict=True)
        }
        lines = (hashlib.blake2b(f"{name} {words}".encode(), digest_size=8) for name, words in tensors.items())
        digest = sum(int.from_bytes(line.digest(), "big") for line in lines) % 2**64  # in whatever order they came
        whole = {"step": self.step, "bytes": self.num_bytes, "sum": sum(sums) % 2**32, "count": len(tensors)}
        return whole | {"digest": f"{digest:016x}", "tensors": tensors}


def brief(receipt: dict) -> dict:
    """A receipt without its ``tensors``: what the driver compares, whatever the model."""
    return {name: value for name, value in receipt.items() if name != "tensors"}


def verify_ranks(
    ranks: Sequence[dict],
    arrived: Sequence[Sequence[dict]],
    step: int,
    ask_whole: Callable[[], tuple[Sequence[dict], Sequence[Sequence[dict]]]],
) -> None:
    """Compare what every trainer rank sent with what arrived at the engine worker beside it.

    Args:
        ranks: ``flashrl_refit_report`` of every trainer rank (``trainer/worker.py``), with brief receipts.
        arrived: the receipts of every replica's engine workers, brief.
        step: the trainer's global step.
        ask_whole: ``ranks`` and ``arrived`` again with whole receipts; called where two differ.

    Raises:
        RefitError: two receipts differ, which names the step and the tensors at fault, or a worker has no trainer rank
            that sends to it.
    """
    for number, rank in enumerate(ranks):
        replica, position = rank["replica"], rank["rank_in_replica"]
        sent, received, where = rank["sent"], arrived[replica][position], f"rollout replica {replica}, rank {position}"
        for side, receipt in (("trainer sent", sent), ("rollout engine has", received)):
            if receipt.get("step") != step:
                raise RefitError(
                    f"{where}: the {side} the weights of step {receipt.get('step')}, but the trainer is at step "
                    f"{step}: a weight update was dropped; the responses it would sample are stale"
                )
        if not sent["count"]:
            raise RefitError(f"{where}: the trainer sent no tensor at step {step}")
        if sent["digest"] != received["digest"]:
            whole_ranks, whole_arrived = ask_whole()
            _raise_difference(whole_ranks[number]["sent"], whole_arrived[replica][position], step, where)
    served = {(rank["replica"], rank["rank_in_replica"]) for rank in ranks}
    workers = [(replica, position) for replica, receipts in enumerate(arrived) for position in range(len(receipts))]
    unserved = [
        f"replica {replica}, rank {position}" for replica, position in workers if (replica, position) not in served
    ]
    if unserved:
        raise RefitError(f"step {step}: no trainer rank sends to the rollout's {'; '.join(unserved)}")


def _raise_difference(sent: dict, received: dict, step: int, where: str) -> NoReturn:
    sent, taken = sent["tensors"], received["tensors"]
    wrong = [name for name in {**sent, **taken} if sent.get(name) != taken.get(name)]
    told = [f"{name} (sent {sent.get(name, 'nothing')}, arrived {taken.get(name, 'nothing')})" for name in wrong]
    raise RefitError(
        f"{where}: at step {step} what arrived at the rollout engine is not what the trainer sent for {len(wrong)} of "
        f"{len(sent)} tensors: {listed(told)}"
    )
