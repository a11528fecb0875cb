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
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import ray

from flashrl_verl.errors import NodeLostError

log = logging.getLogger("verl.flashrl")

INTERVAL_S = 2.0
"""How often the list of nodes is asked for, seconds. Ray itself notices a dead node at once when its process ended, and after
half a minute when it only became silent."""

SETTLING_S = 20.0
"""How long after another error to wait for Ray to say that a node is gone: actors' errors are sometimes first."""


class NodeWatch:
    """Looks for nodes that are gone.

    Args:
        nodes: ids of the nodes that the run needs.
        how_to_go_on: the remedy, for the message.
    """

    def __init__(self, nodes: Collection[str], how_to_go_on: str):
        self._addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] in set(nodes)}
        self._how_to_go_on = how_to_go_on
        self._done = threading.Event()

    def gone(self) -> list[str]:
        """Addresses and ids of needed nodes that are not alive."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return [f"{address} ({node[:8]})" for node, address in self._addresses.items() if node not in alive]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a node that leaves raises in this thread: at its next line of Python, or instead of what it fails with.

        Raises:
            NodeLostError: a node is gone.
        """
        if len(self._addresses) < 2:
            yield  # the only node takes this process with it
            return
        watcher = threading.Thread(target=self._watch, args=(threading.get_ident(),), name="node-watch", daemon=True)
        watcher.start()
        try:
            yield
        except NodeLostError:  # raised by the thread, which cannot hand over a message
            raise self._error() from None
        except Exception as error:
            deadline = time.monotonic() + SETTLING_S
            while not self.gone() and time.monotonic() < deadline:
                time.sleep(0.5)
            if self.gone():
                raise self._error() from error
            raise
        finally:
            self._done.set()

    def _watch(self, thread: int) -> None:
        while not self._done.wait(INTERVAL_S):
            if gone := self.gone():
                log.error("[flashrl] left the Ray cluster: %s; ending the run", ", ".join(gone))
                # Python's way to raise in another thread (https://docs.python.org/3/c-api/threads.html).
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(NodeLostError))
                return

    def _error(self) -> NodeLostError:
        return NodeLostError(f"{', '.join(self.gone())} left the Ray cluster, and its workers with it. {self._how_to_go_on}")


def nodes_of(placement_groups: Collection) -> set[str]:
    """Ids of the nodes that hold the bundles of ``placement_groups``."""
    table = (ray.util.placement_group_table(group) for group in placement_groups)
    return {node for group in table for node in group["bundles_to_node_id"].values()}
