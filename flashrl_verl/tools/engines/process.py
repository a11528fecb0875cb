# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own: sleep mode's allocator and vLLM's groups allow one a process, and its memory is
free again when it ends. Question and answer are JSON files beside its log; ``engine_child`` is what the process does
with them."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.log_excerpt import last_error
from flashrl_verl.tools.process_tree import ProcessTree, stoppable

ROOT = Path(__file__).resolve().parents[3]
"""Where this package lies: a process started there with ``python -m`` imports the same one."""
PATIENCE = ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0))
"""How an engine is ended: signals, and seconds to wait after each. No SIGINT first: vLLM's client (0.27.1) goes on
waiting for its engine's start when it gets one, and what there is of answers is in files by then."""


Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class Question(Generic[Key]):
    """What one process is to do."""

    key: Key
    """The caller's, to tell its answer by."""
    name: str
    """Of its files."""
    job: dict[str, Any]
    title: str | None = None
    """What an error calls it; without one, its name."""


class _Asked:
    """A process that is answering.

    Args:
        module: it runs ``python -m MODULE JOB.json ANSWER.json``.
        question: what it is asked.
        folder: for its files and its log, ``<name>.log``.
        gpus: that it sees, by ``CUDA_VISIBLE_DEVICES``; None: all that this process does.
    """

    def __init__(self, module: str, question: Question, folder: Path, gpus: str | None):
        self.question, self.gpus = question, gpus
        self._job, self._answer, self._log = (
            folder / f"{question.name}.{end}" for end in ("job.json", "answer.json", "log")
        )
        self._job.write_text(json.dumps(question.job))
        self._answer.unlink(missing_ok=True)
        self._log.unlink(missing_ok=True)
        command = [sys.executable, "-m", module, str(self._job), str(self._answer)]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
        env |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        self._tree = ProcessTree(command, self._log, env, ROOT)

    def is_over(self) -> bool:
        """Does not wait."""
        return self._tree.poll() is not None

    def end(self) -> None:
        """End what is left of it, and wait."""
        self._tree.end(PATIENCE)

    def answer(self) -> dict[str, Any]:
        """Of one that is over.

        Raises:
            FlashRLError: it failed; the message has its error and the log's path.
        """
        code = self._tree.poll()
        if code or not self._answer.is_file():
            said = "\n  ".join(last_error(self._log.read_text(errors="replace")))
            title = self.question.title or self.question.name
            raise FlashRLError(f"{title} failed (exit code {code}):\n  {said}\nwhole log: {self._log}")
        answer = json.loads(self._answer.read_text())
        for path in (self._job, self._answer):
            path.unlink()
        return answer


def answers(
    module: str,
    questions: Iterable[Question[Key]],
    folder: Path,
    places: Sequence[str | None] = (None,),
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Run ``python -m MODULE JOB.json ANSWER.json`` for each question, one at each place at a time.

    Args:
        module: to run.
        questions: taken one by one, as places become free.
        folder: for files and logs.
        places: the GPUs of each, as in ``CUDA_VISIBLE_DEVICES``; None: all that this process sees.
        meanwhile: called every half second.

    Yields:
        Keys of questions and their answers, as they come. Whatever runs is ended where the caller closes this.

    Raises:
        FlashRLError: a process failed; the message has its error and the log's path. What has ended by then is yielded
            first, and the others are ended.
    """
    folder, waiting, free, going = folder.resolve(), iter(questions), list(places), []
    with stoppable():
        try:
            while True:
                while free and (question := next(waiting, None)) is not None:
                    going.append(_Asked(module, question, folder, free.pop(0)))
                if not going:
                    return
                while not (over := [asked for asked in going if asked.is_over()]):
                    time.sleep(0.5)
                    meanwhile()
                failed = []
                for asked in over:
                    asked.end()  # its children may outlive it for a while, and hold memory of the GPU
                    going.remove(asked)
                    free.append(asked.gpus)
                    try:
                        answer = asked.answer()
                    except FlashRLError as error:  # what others have answered meanwhile is not lost
                        failed.append(error)
                    else:
                        yield asked.question.key, answer
                if failed:
                    raise failed[0]
        finally:
            _end_all(going)


def _end_all(going: Sequence[_Asked]) -> None:
    """At once: one after another would take as many times 20 s. Ctrl-C is ignored meanwhile, so that none is left."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        enders = [threading.Thread(target=asked.end, name=f"ending {asked.question.name}") for asked in going]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ask(
    module: str,
    name: str,
    job: dict[str, Any],
    folder: Path,
    *,
    title: str | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The answer of one process to one question: see ``answers`` and ``Question``."""
    question = Question(key=None, name=name, job=job, title=title)
    ((_, answer),) = answers(module, [question], folder, meanwhile=meanwhile)
    return answer
