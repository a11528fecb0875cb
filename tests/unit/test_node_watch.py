# SPDX-License-Identifier: Apache-2.0
"""A lost node ends the process that waits for it, by one line that names it; nothing else does."""

import subprocess
import sys

import pytest

PROGRAM = """
import threading, time
import ray
from flashrl_verl.errors import GuardError
from flashrl_verl.trainer import node_watch

node_watch.INTERVAL_S, node_watch.SETTLING_S, node_watch._TELLING_S = 0.05, 3.0, 0.1
lost, asked = False, 0

def nodes():
    global asked
    asked += 1
    if asked <= 3:
        raise ConnectionError("busy")
    return [{"NodeID": "a" * 56, "Alive": True}, {"NodeID": "b" * 56, "Alive": not lost}]

def lose():
    global lost
    lost = True

ray.nodes = nodes
needed = {"a" * 56: "10.0.0.1", "b" * 56: "10.0.0.2"}
"""
LOST = "NodeLostError: 10.0.0.2 (bbbbbbbb) left the Ray cluster, and its workers with it. Replace it.\n"

FOR_EVER = """
with node_watch.watching(needed, "Replace it."):
    lose()
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass
"""
AFTER_AN_ERROR = """
with node_watch.watching(needed, "Replace it."):
    threading.Timer(0.3, lose).start()
    raise RuntimeError("verl's")
"""
NO_NODE_IS_LOST = """
with node_watch.watching(needed, "Replace it."):
    raise RuntimeError("verl's")
"""
OURS = """
node_watch.SETTLING_S = 3600
with node_watch.watching(needed, "Replace it."):
    raise GuardError("a stop")
"""
OUTSIDE = """
with node_watch.watching(needed, "Replace it."):
    time.sleep(0.4)
lose()
with node_watch.watching({}, "Replace it."):
    time.sleep(0.5)
"""


@pytest.mark.parametrize(
    "body, status, said",
    [
        pytest.param(FOR_EVER, 1, LOST, id="verl polls for ever"),
        pytest.param(AFTER_AN_ERROR, 1, LOST, id="an error comes before Ray names the node"),
        pytest.param(NO_NODE_IS_LOST, 1, "RuntimeError: verl's\n", id="an error of a whole cluster"),
        pytest.param(OURS, 1, "GuardError: a stop\n", id="an error of ours does not wait"),
        pytest.param(OUTSIDE, 0, "", id="after the block, and without nodes"),
    ],
)
def test_a_process_ends_by_the_lost_node_or_by_its_own_error(body, status, said):
    ended = subprocess.run([sys.executable, "-c", PROGRAM + body], capture_output=True, text=True, timeout=300)
    assert ended.returncode == status and ended.stderr.endswith(said)
    assert ("NodeLostError" in ended.stderr) == (said == LOST)
