# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own: sleep mode's allocator and vLLM's groups allow one a process, and its memory is free again
when it ends. Question and answer are JSON files beside its log; ``engine_child`` is what the process does with them."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrl_verl.errors import FlashRLError
from flashrl_verl.log_excerpt import last_error
from flashrl_verl.process_tree import ProcessTree, stoppable

ROOT = Path(__file__).resolve().parents[2]
"""Where this package lies: a process started there with ``python -m`` imports the same one."""


def ask(
    module: str,
    name: str,
    job: dict[str, Any],
    folder: Path,
    *,
    title: str | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run ``python -m MODULE JOB.json ANSWER.json`` to its end.

    Args:
        module: to run.
        name: of its files in ``folder``.
        job: the question.
        folder: for its log, ``<name>.log``.
        title: what an error calls it; without one, its name.
        meanwhile: called every half second.

    Raises:
        FlashRLError: it failed; the message has its error and the log's path.
    """
    folder = folder.resolve()
    job_file, answer_file, log = (folder / f"{name}.{end}" for end in ("job.json", "answer.json", "log"))
    job_file.write_text(json.dumps(job))
    answer_file.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, str(job_file), str(answer_file)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    tree = ProcessTree(command, log, env, ROOT, memory=False)
    with stoppable():
        try:
            while (code := tree.poll()) is None:
                time.sleep(0.5)
                meanwhile()
        finally:
            tree.end()
    if code or not answer_file.is_file():
        said = "\n  ".join(last_error(log.read_text(errors="replace")))
        raise FlashRLError(f"{title or name} failed (exit code {code}):\n  {said}\nwhole log: {log}")
    answer = json.loads(answer_file.read_text())
    for path in (job_file, answer_file):
        path.unlink()
    return answer
