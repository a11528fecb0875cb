# SPDX-License-Identifier: Apache-2.0
"""A lost node raises in the thread that trains, once it is left nothing does, and other errors stay what they are."""

import threading
import time
from contextlib import suppress

import pytest
from ray.exceptions import RayError

from flashrl_verl import node_watch
from flashrl_verl.errors import NodeLostError
from flashrl_verl.node_watch import NodeWatch

NODES = {"a" * 56: "10.0.0.1", "b" * 56: "10.0.0.2"}


class Cluster:
    """The ids of the nodes that are alive; answers may be errors."""

    def __init__(self):
        self.alive, self.broken, self.asked_by = set(NODES), 0, set()

    def __call__(self):
        self.asked_by.add(threading.current_thread())
        if self.broken:
            self.broken -= 1
            raise ConnectionError("busy")
        return self.alive

    def lose(self):
        self.alive = {"a" * 56}


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(node_watch, "INTERVAL_S", 0.02)
    monkeypatch.setattr(node_watch, "SETTLING_S", 0.5)
    return Cluster()


def poll(seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.001)


def test_a_thread_that_polls_is_told_with_node_and_remedy(cluster):
    with pytest.raises(NodeLostError, match=r"^10\.0\.0\.2 \(bbbbbbbb\) left the Ray cluster.*how to go on$"):
        with NodeWatch(NODES, cluster, "how to go on").watching():
            cluster.lose()
            poll()


def test_code_that_catches_every_exception_does_not_hide_it(cluster):
    with pytest.raises(NodeLostError):
        with NodeWatch(NODES, cluster, "").watching():
            cluster.lose()
            for _ in range(2000):
                try:
                    poll(0.01)
                except Exception:
                    pass


def test_what_swallows_it_once_is_told_again(cluster):
    swallowed = 0
    with pytest.raises(NodeLostError):
        with NodeWatch(NODES, cluster, "").watching():
            cluster.lose()
            try:
                poll()
            except BaseException:  # as asyncio does in its callbacks
                swallowed += 1
            poll()
    assert swallowed == 1


def test_after_the_block_nothing_is_raised_any_more(cluster):
    for _ in range(50):
        cluster.alive = set(NODES)
        with suppress(NodeLostError), NodeWatch(NODES, cluster, "").watching():
            time.sleep(0.015)
            cluster.lose()  # about when the watcher looks, which may still be within the block
    poll(0.2)
    assert not [thread for thread in threading.enumerate() if thread.name == "node-watch"]


def test_an_actors_error_before_the_node_is_known_to_be_gone_becomes_the_nodes(cluster):
    threading.Timer(0.1, cluster.lose).start()
    with pytest.raises(NodeLostError) as caught:
        with NodeWatch(NODES, cluster, "").watching():
            raise RayError("the actor died")
    assert "the actor died" in str(caught.value.__cause__)


@pytest.mark.parametrize("error", [RayError("died of itself"), ValueError("ours"), KeyboardInterrupt()])
def test_other_errors_stay_what_they_are(cluster, error):
    with pytest.raises(type(error)) as caught:
        with NodeWatch(NODES, cluster, "").watching():
            raise error
    assert caught.value is error
    waited = threading.current_thread() in cluster.asked_by
    assert waited == isinstance(error, RayError), "only after Ray's errors is the cluster looked at once more"


def test_a_question_that_is_not_answered_is_asked_again(cluster):
    cluster.broken = 3
    with pytest.raises(NodeLostError):
        with NodeWatch(NODES, cluster, "").watching():
            cluster.lose()
            poll()


def test_without_nodes_nothing_is_watched(cluster):
    cluster.lose()
    with NodeWatch({}, cluster, "").watching():
        poll(0.1)
