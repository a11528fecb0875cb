# SPDX-License-Identifier: Apache-2.0
"""A dead worker ends the process that waits for it, by one line that names it; nothing else does."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, threading, time
import ray
from flashrl_verl.errors import GuardError
from flashrl_verl.trainer import worker_watch

@ray.remote(num_cpus=0)
class Worker:
    def pid(self):
        return os.getpid()

    def work(self):
        time.sleep(3600)

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
worker_watch.INTERVAL_S, worker_watch.SETTLING_S, worker_watch._TELLING_S = 0.2, 30.0, 0.1
workers = [Worker.remote(), Worker.remote()]
pids = ray.get([worker.pid.remote() for worker in workers])
busy = workers[1].work.remote()

def lose():
    os.kill(pids[1], signal.SIGKILL)

def watching():
    return worker_watch.watching(workers, "Rerun it.")
"""
FOR_EVER = """
with watching():
    threading.Timer(1.0, lose).start()
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass
"""
AFTER_AN_ERROR = """
ray.nodes = lambda: 2 * [{"Alive": True}]
with watching():
    threading.Timer(1.0, lose).start()
    raise RuntimeError("verl's")
"""
CALLED = """
for error in RuntimeError("verl's"), GuardError("a stop"):
    try:
        with watching():
            time.sleep(1.0)
            raise error
    except (RuntimeError, GuardError) as raised:
        assert raised is error
    ray.nodes = lambda: 2 * [{"Alive": True}]  # but an error of ours does not wait
with watching():
    lose()
    ray.get(workers[1].pid.remote())
"""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(FOR_EVER, id="verl polls for ever"),
        pytest.param(AFTER_AN_ERROR, id="an error comes before Ray tells of the worker"),
        pytest.param(CALLED, id="other errors pass, and verl calls it"),
    ],
)
def test_a_lost_worker_ends_the_process(body):
    ended = subprocess.run([sys.executable, "-c", PROGRAM + body], capture_output=True, text=True, timeout=60)
    last = (ended.stderr.strip().splitlines() or [""])[-1]
    assert ended.returncode == 1 and "WorkerLostError: " in last and last.endswith("Rerun it."), ended.stderr
