# SPDX-License-Identifier: Apache-2.0
"""A node that leaves the Ray cluster ends the run, by one error that names it.

Ray tells whoever calls an actor of that node. But verl's sampler asks nobody: it polls for groups that are never finished, or
replaces those that failed, for ever. So the trainer's process looks at the cluster itself while it trains.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flashrl_verl.errors import NodeLostError

log = logging.getLogger("verl.flashrl")

INTERVAL_S = 2.0
"""How often the list of nodes is asked for, seconds. Ray itself notices a dead node at once when its process ended, and after
half a minute when it only became silent."""

SETTLING_S = 20.0
"""How long after an error of Ray's to wait for it to say that a node is gone: the actors' errors are sometimes first."""


class _NodeLeft(BaseException):
    """Raised in the trainer's thread, where `except Exception` must not catch it; translated before anybody sees it."""


class NodeWatch:
    """Looks for nodes that are gone.

    Args:
        nodes: id to address of the nodes that the run needs; nothing is watched where there are none.
        alive: ids of the nodes that are alive now.
        how_to_go_on: the remedy, for the message.
    """

    def __init__(self, nodes: Mapping[str, str], alive: Callable[[], Iterable[str]], how_to_go_on: str):
        self._nodes = dict(nodes)
        self._alive = alive
        self._how_to_go_on = how_to_go_on

    def gone(self) -> list[str]:
        """Addresses and ids of needed nodes that are not alive."""
        alive = set(self._alive())
        return [f"{address} ({node[:8]})" for node, address in self._nodes.items() if node not in alive]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a node that leaves raises in this thread: at its next line of Python, or instead of what it fails with.

        Raises:
            NodeLostError: a node is gone.
        """
        if not self._nodes:
            yield
            return
        thread, done = threading.get_ident(), threading.Event()
        watcher = threading.Thread(target=self._watch, args=(thread, done), name="node-watch", daemon=True)
        watcher.start()
        try:
            try:
                yield
            finally:
                _end(watcher, thread, done)
        except _NodeLeft:
            raise self._error() from None
        except Exception as error:
            if _may_come_of_a_lost_node(error) and self._settles():
                raise self._error() from error
            raise

    def _settles(self) -> bool:
        deadline = time.monotonic() + SETTLING_S
        while not (gone := self.gone()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return bool(gone)

    def _watch(self, thread: int, done: threading.Event) -> None:
        told = False
        while not done.wait(INTERVAL_S):
            try:
                gone = self.gone()
            except Exception as error:  # the cluster's service is busy or restarting: the next look may be answered
                log.warning("[flashrl] the list of nodes cannot be had (%s: %s)", type(error).__name__, error)
                continue
            if gone and not done.is_set():
                if not told:
                    log.error("[flashrl] left the Ray cluster: %s; ending the run", ", ".join(gone))
                told = True
                _raise_in(thread, _NodeLeft)  # again every time: asyncio's callbacks catch whatever is raised in them

    def _error(self) -> NodeLostError:
        return NodeLostError(f"{', '.join(self.gone())} left the Ray cluster, and its workers with it. {self._how_to_go_on}")


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Python's way to raise in another thread (https://docs.python.org/3/c-api/threads.html); None takes back what waits."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error))


def _end(watcher: threading.Thread, thread: int, done: threading.Event) -> None:
    """After it nothing is raised in ``thread`` any more, what was on its way included."""
    while True:
        try:
            done.set()
            watcher.join(SETTLING_S)
            _raise_in(thread, None)
            return
        except _NodeLeft:  # arrived on these lines; what ended the block is told by others
            continue


def _may_come_of_a_lost_node(error: Exception) -> bool:
    import ray

    return isinstance(error, ray.exceptions.RayError)


def ray_nodes() -> list[dict[str, Any]]:
    """Ray's records of the nodes that are alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def needed_nodes() -> dict[str, str]:
    """Id to address of all nodes with CPUs that are alive now: verl spreads agent loops, rewards and storage over all of them.

    Empty where there is none but this process's own, which takes it along.
    """
    import ray

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray_nodes() if node["Resources"].get("CPU")}
    return {} if nodes.keys() <= {ray.get_runtime_context().get_node_id()} else nodes
