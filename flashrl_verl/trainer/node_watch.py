# SPDX-License-Identifier: Apache-2.0
"""A node that leaves the Ray cluster ends the run, by one error that names it.

Ray tells whoever calls an actor of that node. But verl's sampler asks nobody: it polls for ever for responses that
never come. So the trainer's process looks at the cluster itself while it trains.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray

from flashrl_verl.errors import FlashRLError

log = logging.getLogger("verl.flashrl")

INTERVAL_S = 2.0
"""How often the list of nodes is asked for. Ray notices a dead process at once, a silent node after half a minute."""

SETTLING_S = 20.0
"""Wait this long after another error: a lost node may be its cause, and is reported later."""

_TELLING_S = 5.0
"""How long Ray takes to carry the last lines of a process to the driver's console."""


def needed_nodes() -> dict[str, str]:
    """Id to address of all nodes with CPUs that are alive now: verl spreads agent loops, rewards and storage over all
    of them.

    Empty where there is none but this process's own, which takes it along.
    """
    alive = (node for node in ray.nodes() if node["Alive"])
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in alive if node["Resources"].get("CPU")}
    return {} if nodes.keys() <= {ray.get_runtime_context().get_node_id()} else nodes


@contextmanager
def watching(nodes: Mapping[str, str], remedy: str) -> Iterator[None]:
    """Within it a lost node ends this process, whatever its other threads wait for; without ``nodes`` nothing is
    watched.

    Args:
        nodes: id to address of those that the run needs.
        remedy: for the error.
    """
    done = threading.Event()
    if nodes:
        threading.Thread(target=_watch, args=(nodes, remedy, done), name="node-watch", daemon=True).start()
    try:
        yield
    except Exception as error:
        if nodes and not isinstance(error, FlashRLError):
            done.wait(SETTLING_S)  # if a node is why, the thread ends the run by its name
        raise
    finally:
        done.set()


def _watch(nodes: Mapping[str, str], remedy: str, done: threading.Event) -> None:
    while not done.wait(INTERVAL_S):
        try:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        except Exception as error:  # the cluster's service is busy or restarting: the next look may be answered
            log.warning("[flashrl] the list of nodes cannot be had (%s: %s)", type(error).__name__, error)
            continue
        gone = [f"{address} ({node[:8]})" for node, address in nodes.items() if node not in alive]
        if gone and not done.is_set():
            told = f"{', '.join(gone)} left the Ray cluster, and its workers with it. {remedy}"
            print(f"NodeLostError: {told}", file=sys.stderr, flush=True)
            time.sleep(_TELLING_S)
            os._exit(1)
