# SPDX-License-Identifier: Apache-2.0
"""A file that cannot be written keeps its old content, and nothing is left beside it."""

import subprocess
import sys


def test_a_file_that_does_not_fit_leaves_the_old_one(tmp_path):
    path = tmp_path / "state.json"
    path.write_bytes(b"old")
    code = (
        "import resource, signal, sys; from pathlib import Path; from flashrl_verl.trainer.atomic_write import "
        "write_whole\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, "
        "1000))\ntry: write_whole(Path(sys.argv[1]), bytes(100_000))\nexcept OSError as error: print(error.strerror)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_stop_in_the_middle_leaves_nothing_beside_the_file(tmp_path):
    path = tmp_path / "state.json"
    code = (
        "import signal, sys; from pathlib import Path; from flashrl_verl.tools.process_tree import Stopped\nfrom "
        "flashrl_verl.trainer.atomic_write import write_whole\ndef stop(number, frame): raise "
        "Stopped(number)\nsignal.signal(signal.SIGALRM, stop); content = bytes(50_000_000)\ntry:\n    "
        "signal.setitimer(signal.ITIMER_REAL, 0.2)\n    while True: write_whole(Path(sys.argv[1]), content)\nexcept "
        "Stopped: print('stopped')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "stopped\n"
    assert [file.name for file in tmp_path.iterdir() if file != path] == []
    assert not path.exists() or path.stat().st_size == 50_000_000
