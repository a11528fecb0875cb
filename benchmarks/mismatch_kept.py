# SPDX-License-Identifier: Apache-2.0
"""Answers of the engines that ``flashrl bench mismatch`` has heard, so that a stopped command goes on behind the last
one.

They are there until the report is written, and only good for the same question to the same model, device and software.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import flashrl_verl
from flashrl_verl.tools.engines.mismatch_engine import Answer, Job, arm_of, ask, name_of, require_formats
from flashrl_verl.tools.software import software
from flashrl_verl.trainer.atomic_write import write_whole

_END = ".kept.json"
_PACKAGE = Path(flashrl_verl.__file__).parent


def forget(folder: Path) -> None:
    """Remove all answers in a folder: the next command measures anew."""
    for path in folder.glob(f"*{_END}"):
        path.unlink()


class KeptAnswers:
    """Those in a folder.

    Args:
        folder: of the results.
        device: that the engines run on, as the report names it.
    """

    def __init__(self, folder: Path, device: str):
        self._folder, self._device = folder, device

    def ask(self, job: Job, progress: Callable[[str], None]) -> Answer:
        """The engine's answer: the one that is there, or a new one, which is written down.

        Args:
            job: the question.
            progress: called with a line.

        Raises:
            FlashRLError: the engine failed, or is not what it was to be.
            OSError: no space, no rights, ...
        """
        arm = arm_of(job)
        answer = self.find(job)
        if answer is not None:
            progress(f"{arm} engine: measured before the stop")
            return answer
        progress(f"{arm} engine: start, weight updates, {len(job.prompts)} responses")
        answer = ask(job, self._folder)
        require_formats(arm, answer.layers, "--precision")
        self.keep(job, answer)
        return answer

    def keep(self, job: Job, answer: Answer) -> None:
        """Write an answer down.

        Raises:
            OSError: no space, no rights, ...
        """
        write_whole(self._file(job), json.dumps({"of": self._of(job), "answer": asdict(answer)}).encode())

    def find(self, job: Job) -> Answer | None:
        """The answer to this very question; None where there is none, or none that can be read."""
        try:
            kept = json.loads(self._file(job).read_text())
            return Answer(**kept["answer"]) if kept["of"] == self._of(job) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # asked again: that costs a minute and is always right

    def _file(self, job: Job) -> Path:
        return self._folder / (name_of(job) + _END)

    def _of(self, job: Job) -> str:
        """SHA-256 of all that an answer depends on; of the weights and of this package, their files' sizes and
        times."""
        places = [*sorted(Path(job.model).iterdir()), *sorted(_PACKAGE.rglob("*.py"))]
        files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in places if f.is_file()]
        return hashlib.sha256(json.dumps([asdict(job), files, software(), self._device]).encode()).hexdigest()
