# SPDX-License-Identifier: Apache-2.0
"""A dead worker ends the wait for it, by one error that names it; a busy one does not."""

import subprocess
import sys

PROGRAM = """
import os, signal, time
import ray
from flashrl_verl.errors import WorkerLostError
from flashrl_verl.trainer import worker_watch

@ray.remote(num_cpus=0)
class Worker:
    def pid(self):
        return os.getpid()

    def work(self):
        time.sleep(3600)

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
worker_watch.INTERVAL_S = 0.1
workers = [Worker.remote(), Worker.remote()]
pids = ray.get([worker.pid.remote() for worker in workers])
busy = workers[1].work.remote()
watch = worker_watch.WorkerWatch(workers, "Rerun it.")
began = time.monotonic()
while time.monotonic() < began + 1.0:
    watch.look()
os.kill(pids[1], signal.SIGKILL)
try:
    while time.monotonic() < began + 30.0:
        watch.look()
except WorkerLostError as error:
    assert str(error).startswith("Actor(Worker") and str(error).endswith("Rerun it."), error
first = RuntimeError("verl's")
assert watch.cause(first) is first
ray.nodes = lambda: 2 * [{"Alive": True}]
assert isinstance(worker_watch.WorkerWatch(workers, "").cause(first), WorkerLostError)
print("told")
"""


def test_a_lost_worker_ends_the_wait():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert ended.stdout.endswith("told\n"), ended.stdout + ended.stderr
