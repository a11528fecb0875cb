# SPDX-License-Identifier: Apache-2.0
"""A command is ended with everything that it started."""

import os
import signal
import sys
import time

import psutil
import pytest

from flashrl_verl.tools.process_tree import ProcessTree

# A child that ignores Ctrl-C in a process group of its own, as Ray's workers are.
CHILD = (
    "import os, signal, time; os.setpgrp(); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "print(os.getpid(), flush=True); time.sleep(600)"
)
PARENTS = {
    "a parent that ends at Ctrl-C": "process.wait()",
    "a parent that is gone": "time.sleep(2); os._exit(3)",
}


@pytest.mark.parametrize("parent", PARENTS)
def test_ending_a_command_leaves_no_process_behind(tmp_path, monkeypatch, parent):
    monkeypatch.setattr("flashrl_verl.tools.process_tree.GRACE", 0.2)
    code = f"import os, subprocess, sys, time; process = subprocess.Popen([sys.executable, '-c', {CHILD!r}])\n"
    log = tmp_path / "log"
    tree = ProcessTree([sys.executable, "-c", code + PARENTS[parent]], log, dict(os.environ), tmp_path)
    try:
        deadline = time.monotonic() + 200
        while not log.read_text().endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.1)
        child = psutil.Process(int(log.read_text()))
        while "gone" in parent and tree.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert child.is_running() and tree.poll() == (3 if "gone" in parent else None)
    finally:
        tree.end(((signal.SIGINT, 1.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)))
    assert tree.poll() is not None
    # A zombie has ended too: it waits for whoever adopted it to take note.
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
