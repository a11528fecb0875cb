# SPDX-License-Identifier: Apache-2.0
"""A worker that dies, or leaves with its node, ends the run by one error that names it.

Ray tells whoever calls it. But verl's sampler calls nobody: it polls for ever for responses that never come, and an
agent loop is what Ray's memory monitor kills first.
"""

import logging
import time
from collections.abc import Callable, Sequence

import ray

from flashrl_verl.errors import FlashRLError, WorkerLostError

log = logging.getLogger("verl.flashrl")

INTERVAL_S = 2.0
"""Between two looks. Ray notices a dead process at once, a silent node after half a minute."""

SETTLING_S = 20.0
"""With several nodes, how long another error waits: a lost one may be its cause, and is noticed later."""

_FULL, _FIGURES = "low on memory", "OOM kill reason"
"""Ray's words for a full host, and those that its pages of figures begin with."""
_SHOWN = 350
"""Characters of both ends: Ray tells the worker first and a constructor's own error last."""
_FREE_MEMORY = (
    "What takes a host's memory: other programs, what FSDP offloads (actor_rollout_ref.actor.fsdp_config.param_offload "
    "and optimizer_offload), helpers (actor_rollout_ref.rollout.agent.num_workers, reward.num_workers)."
)

_DEAD = (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError)


class WorkerWatch:
    """One open call to each worker, which a busy one answers later.

    Args:
        workers: that the run cannot do without.
        remedy: asked for when one is lost.
    """

    def __init__(self, workers: Sequence[ray.actor.ActorHandle], remedy: Callable[[], str]):
        self._calls = {worker.__ray_ready__.remote(): worker for worker in workers}
        self._remedy, self._next = remedy, time.monotonic()

    def look(self) -> None:
        """To be called while waiting, however often.

        Raises:
            WorkerLostError: one has ended.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL_S
        answered, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for call in answered:
            worker = self._calls.pop(call)
            try:
                ray.get(call)
            except _DEAD as error:
                raise self._lost(f"{worker} has ended: {error}") from error
            except ray.exceptions.RayError as error:  # cannot be reached now: the next call may be answered
                log.warning("[flashrl] %s does not answer (%s)", worker, type(error).__name__)
            self._calls[worker.__ray_ready__.remote()] = worker

    def cause(self, error: Exception) -> Exception:
        """Of an error that verl ended with: itself, or the worker that was lost."""
        if isinstance(error, _DEAD):
            return self._lost(error)
        several_nodes = sum(node["Alive"] for node in ray.nodes()) > 1
        end = time.monotonic() + SETTLING_S * several_nodes * (not isinstance(error, FlashRLError))
        while time.monotonic() < end:
            try:
                self.look()
            except WorkerLostError as lost:
                return lost
            time.sleep(INTERVAL_S)
        return error

    def _lost(self, reason: object) -> WorkerLostError:
        said = " ".join(str(reason).partition(_FIGURES)[0].split())
        if len(said) > 2 * _SHOWN:
            said = f"{said[:_SHOWN]} ... {said[-_SHOWN:]}"
        if _FULL in said:
            said += f". {_FREE_MEMORY}"
        return WorkerLostError(f"{said} {self._remedy()}")
