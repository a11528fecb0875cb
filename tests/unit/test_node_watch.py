# SPDX-License-Identifier: Apache-2.0
"""A lost node ends the process that waits for it, by one line that names it; nothing else does."""

import subprocess
import sys

import pytest

PROGRAM = """
import time
import ray
from flashrl_verl.trainer import node_watch

node_watch.INTERVAL_S, node_watch.SETTLING_S, node_watch._TELLING_S = 0.05, 1.0, 0.1
lost, broken, asked = False, 0, 0

def nodes():
    global asked
    asked += 1
    if asked <= broken:
        raise ConnectionError("busy")
    alive = [{"NodeID": "a" * 56, "Alive": True}, {"NodeID": "b" * 56, "Alive": not lost}]
    return alive

ray.nodes = nodes
needed = {"a" * 56: "10.0.0.1", "b" * 56: "10.0.0.2"}
"""


def ends(body: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", PROGRAM + body], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("broken", [0, 3])
def test_a_process_that_polls_for_ever_is_ended_with_node_and_remedy(broken):
    ended = ends(f"""
broken = {broken}
with node_watch.watching(needed, "Replace it."):
    lost = True
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass
""")
    assert ended.returncode == 1
    told = (
        "flashrl_verl.errors.NodeLostError: 10.0.0.2 (bbbbbbbb) left the Ray cluster, and its workers with it. Replace "
        "it.\n"
    )
    assert ended.stderr.endswith(told) and ended.stderr.count("ConnectionError") == broken


def test_an_error_waits_for_the_name_of_the_node_and_stays_what_it_is_without():
    body = """
import threading
from flashrl_verl.errors import GuardError
began = time.monotonic()
try:
    with node_watch.watching(needed, "Replace it."):
        {lose}
        raise {error}
finally:
    print("waited" if time.monotonic() - began > 0.9 else "at once", flush=True)
"""
    lose = "threading.Timer(0.3, lambda: globals().update(lost=True)).start()"
    assert "NodeLostError: 10.0.0.2" in ends(body.format(lose=lose, error="RuntimeError('of verl')")).stderr
    for error, said in (("ray.exceptions.RayError('x')", "waited"), ("GuardError('x')", "at once")):
        ended = ends(body.format(lose="", error=error))
        assert ended.stdout == f"{said}\n" and "NodeLostError" not in ended.stderr


def test_nothing_is_watched_without_nodes_or_after_the_block():
    ended = ends("""
with node_watch.watching({}, ""):
    lost = True
    time.sleep(0.3)
lost = False
with node_watch.watching(needed, ""):
    time.sleep(0.2)
lost = True
time.sleep(0.5)
print("ended by itself")
""")
    assert ended.stdout == "ended by itself\n", ended.stderr
