# SPDX-License-Identifier: Apache-2.0
"""The refit receipt: proof that what the trainer sent at this step is what reached the engine, tensor by tensor.

Health metrics cannot prove it: at a learning rate of 1e-6 a missed update changes the mismatch KL by nothing visible.
So both sides write down the name, shape, dtype and checksum of every tensor that passes, and the driver compares them
after every update.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from flashrl_verl.errors import RefitError, listed
from flashrl_verl.refit.scan import Checksums


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
        """Yield ``weights`` unchanged, recording each."""
        for name, tensor in weights:
            self.add([(name, tensor)])
            yield name, tensor

    def receipt(self) -> dict:
        """Plain data for the driver: ``step``, ``bytes``, ``tensors``: name -> dtype, shape and checksum in words
        (which every serializer leaves as they are), and ``sum``: one number for "the same weights"."""
        sums = self._checksums.results()
        tensors = {
            name: f"{dtype} {list(shape)} checksum {total}"
            for (name, (shape, dtype)), total in zip(self.tensors.items(), sums, strict=True)
        }
        return {"step": self.step, "bytes": self.num_bytes, "tensors": tensors, "sum": sum(sums) % 2**32}


def verify_ranks(ranks: Sequence[dict], held: Sequence[Sequence[dict]], step: int) -> None:
    """Compare what every trainer rank sent with what the engine worker beside it holds.

    Args:
        ranks: ``flashrl_refit_report`` of every trainer rank (``trainer/worker.py``).
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
    unserved = [
        f"replica {replica}, rank {position}" for replica, position in workers if (replica, position) not in served
    ]
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
        RefitError: naming the step and the tensors at fault.
    """
    for side, receipt in (("trainer sent", sent), ("rollout engine holds", received)):
        if receipt.get("step") != step:
            raise RefitError(
                f"{where}: the {side} the weights of step {receipt.get('step')}, but the trainer is at step {step}: "
                "a weight update was dropped; the responses it would sample are stale"
            )
    sent_tensors, taken = sent["tensors"], received["tensors"]
    if not sent_tensors:
        raise RefitError(f"{where}: the trainer sent no tensor at step {step}")
    if sent_tensors == taken:
        return
    wrong = [name for name in {**sent_tensors, **taken} if sent_tensors.get(name) != taken.get(name)]
    told = [
        f"{name} (sent {sent_tensors.get(name, 'nothing')}, arrived {taken.get(name, 'nothing')})" for name in wrong
    ]
    raise RefitError(
        f"{where}: at step {step} the rollout engine does not hold what the trainer sent for {len(wrong)} of "
        f"{len(sent_tensors)} tensors: {listed(told)}"
    )
