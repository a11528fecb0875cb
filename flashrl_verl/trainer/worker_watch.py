# SPDX-License-Identifier: Apache-2.0
"""A worker that dies, or leaves with its node, ends the run by one error that names it.

Ray tells whoever calls it. But verl's sampler calls nobody: it polls for ever for responses that never come. An agent
loop is what Ray's memory monitor kills first. So a thread of the trainer's process keeps a call to every worker open
while it trains.
"""

import logging
import os
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import ray

from flashrl_verl.errors import FlashRLError, WorkerLostError

log = logging.getLogger("verl.flashrl")

INTERVAL_S = 2.0
"""How often answers are looked at. Ray notices a dead process at once, a silent node after half a minute."""

SETTLING_S = 20.0
"""With several nodes, wait this long after another error: a lost one may be its cause, and is noticed later."""

_TELLING_S = 5.0
"""How long Ray takes to carry the last lines of a process to the driver's console."""

_DEAD = (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError)


@contextmanager
def watching(workers: Sequence[ray.actor.ActorHandle], remedy: str) -> Iterator[None]:
    """Within it a dead worker ends this process, whatever its other threads wait for.

    Args:
        workers: that the run cannot do without.
        remedy: for the error.

    Raises:
        WorkerLostError: a call to a worker within it was answered so.
    """
    done, several_nodes = threading.Event(), sum(node["Alive"] for node in ray.nodes()) > 1
    threading.Thread(target=_watch, args=(workers, remedy, done), name="worker-watch", daemon=True).start()
    try:
        yield
    except _DEAD as error:
        raise WorkerLostError(_told(error, remedy)) from error
    except Exception as error:
        if several_nodes and not isinstance(error, FlashRLError):
            done.wait(SETTLING_S)  # if a node is why, the thread ends the run by its name
        raise
    finally:
        done.set()


def _told(reason: object, remedy: str) -> str:
    return f"{textwrap.shorten(str(reason), 700, placeholder=' ...')} {remedy}"


def _watch(workers: Sequence[ray.actor.ActorHandle], remedy: str, done: threading.Event) -> None:
    # One call each, which a busy worker answers later.
    calls = {worker.__ray_ready__.remote(): worker for worker in workers}
    while not done.wait(INTERVAL_S):
        answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for call in answered:
            worker = calls.pop(call)
            try:
                ray.get(call)
            except _DEAD as error:
                if not done.is_set():
                    told = _told(f"{worker} has ended: {error}", remedy)
                    print(f"WorkerLostError: {told}", file=sys.stderr, flush=True)
                    if not done.wait(_TELLING_S):
                        os._exit(1)
            except ray.exceptions.RayError as error:  # cannot be reached now: the next call may be answered
                log.warning("[flashrl] %s does not answer (%s)", worker, type(error).__name__)
            calls[worker.__ray_ready__.remote()] = worker
