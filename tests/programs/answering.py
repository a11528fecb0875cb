# SPDX-License-Identifier: Apache-2.0
"""A process that `engine_process` may ask: adds two numbers, with a child of its own, or fails where there is nothing
to add.

python -m answering JOB.json ANSWER.json
"""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.engines.child import run_child


@dataclass(frozen=True, kw_only=True)
class Job:
    numbers: list[int]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    total: int
    folder: str


def work(job: Job, folder: Path) -> Answer:
    """The sum, after a while, in which a child sleeps that outlives this process. Deaf to SIGINT, as vLLM's client is
    while it waits for its engine's start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not job.numbers:
        raise FlashRLError("--numbers is empty")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "child").write_text(str(child.pid))
    time.sleep(job.seconds)
    return Answer(total=sum(job.numbers), folder=str(folder))


if __name__ == "__main__":
    run_child(Job, work)
