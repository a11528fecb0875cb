# SPDX-License-Identifier: Apache-2.0
"""A process that is asked: its answer or its error comes back, nothing of it stays, and the waiting does not disturb
it."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.engines import process as engine_process
from flashrl_verl.tools.process_tree import Stopped

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"


@pytest.fixture(autouse=True)
def _programs_are_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{PROGRAMS}:{engine_process.ROOT}")


def ended(pid: int) -> bool:
    """A zombie has ended too: it waits for whoever adopted it to take note."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_answer_comes_back_and_nothing_stays(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr("flashrl_verl.tools.process_tree.GRACE", 0.5)
    job = {"numbers": [1, 2, 4], "seconds": 3.0}
    answer = engine_process.ask("answering", "sum", job, tmp_path, meanwhile=lambda: looks.append(time.monotonic()))
    assert answer == {"total": 7, "folder": str(tmp_path)} and len(looks) > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "sum.log"]
    assert ended(int((tmp_path / "child").read_text()))


def jobs(*numbers: list[int], seconds: float) -> list[engine_process.Question]:
    return [
        engine_process.Question(key=i, name=f"sum{i}", job={"numbers": n, "seconds": seconds})
        for i, n in enumerate(numbers)
    ]


@pytest.mark.slow
def test_as_many_are_asked_at_a_time_as_there_are_places(tmp_path, monkeypatch):
    monkeypatch.setattr("flashrl_verl.tools.process_tree.GRACE", 0.2)
    started = []

    class Tree(engine_process.ProcessTree):
        def __init__(self, command, log, env, cwd):
            started.append((Path(command[3]).name, env.get("CUDA_VISIBLE_DEVICES"), time.monotonic()))
            super().__init__(command, log, env, cwd)

    monkeypatch.setattr(engine_process, "ProcessTree", Tree)
    found = dict(engine_process.answers("answering", jobs([1], [2, 3], [4], seconds=1.0), tmp_path, ("0", "1")))
    assert {key: answer["total"] for key, answer in found.items()} == {0: 1, 1: 5, 2: 4}
    assert [place for _, place, _ in started[:2]] == ["0", "1"] and started[2][1] in ("0", "1")
    assert started[1][2] - started[0][2] < 0.9 < started[2][2] - started[0][2]


def left(folder: Path) -> list[int]:
    """Processes that work on a job of this folder."""
    return [
        p.pid for p in psutil.process_iter(["cmdline"]) if any(str(folder) in word for word in p.info["cmdline"] or [])
    ]


def wait_for(count: int, folder: Path) -> None:
    over = time.monotonic() + 60
    while len(left(folder)) < count and time.monotonic() < over:
        time.sleep(0.1)
    assert len(left(folder)) >= count


@pytest.mark.slow
def test_where_one_fails_the_others_are_ended(tmp_path):
    asked = engine_process.answers("answering", jobs([], [5], seconds=600.0), tmp_path, ("0", "1"))
    with pytest.raises(FlashRLError, match="sum0 failed"):
        next(asked)
    assert not left(tmp_path)


@pytest.mark.slow
def test_what_has_ended_beside_a_failure_is_not_lost(tmp_path, monkeypatch):
    """Both are over at the first look: the failure comes first in line, and the answer is yielded before it is
    raised."""
    monkeypatch.setattr("flashrl_verl.tools.process_tree.GRACE", 0.2)
    is_over = engine_process._Asked.is_over
    monkeypatch.setattr(
        engine_process._Asked, "is_over", lambda self: is_over(self) and len(list(tmp_path.glob("*.done"))) > 0
    )

    def meanwhile():
        if (tmp_path / "sum1.answer.json").is_file() and "is empty" in (tmp_path / "sum0.log").read_text():
            time.sleep(3.0)  # until both processes are gone
            (tmp_path / "all.done").touch()

    asked = engine_process.answers("answering", jobs([], [5], seconds=0.0), tmp_path, ("0", "1"), meanwhile)
    assert next(asked) == (1, {"total": 5, "folder": str(tmp_path)})
    with pytest.raises(FlashRLError, match="sum0 failed"):
        next(asked)


@pytest.mark.slow
def test_what_runs_is_ended_where_the_caller_closes(tmp_path, monkeypatch):
    monkeypatch.setattr("flashrl_verl.tools.process_tree.GRACE", 0.2)
    made = [*jobs([1], seconds=0.0), *jobs([0], [2], [3], seconds=600.0)[1:]]
    asked = engine_process.answers("answering", made, tmp_path, ("0", "1", "2"))
    assert next(asked)[0] == 0
    wait_for(2, tmp_path)
    closed = time.monotonic()
    asked.close()
    assert not left(tmp_path) and time.monotonic() - closed < 15, "what SIGINT does not end is waited for"


@pytest.mark.slow
def test_ctrl_c_again_while_engines_are_ended_leaves_none(tmp_path, monkeypatch):
    """The second one comes while the first engine's processes are looked for."""
    asked = engine_process.answers(
        "answering", jobs([1], [2], seconds=600.0), tmp_path, ("0", "1"), lambda: interrupt()
    )
    looks, alive = [], engine_process.ProcessTree._alive

    def interrupt():
        if len(left(tmp_path)) >= 2 and not looks:
            looks.append("first")
            signal.raise_signal(signal.SIGINT)

    def slowly(self):
        if looks == ["first"]:
            looks.append("second")
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return alive(self)

    monkeypatch.setattr(engine_process.ProcessTree, "_alive", slowly)
    with pytest.raises(Stopped):
        next(asked)
    assert looks == ["first", "second"] and not left(tmp_path)


def test_an_error_comes_back_with_its_message_and_the_log(tmp_path):
    with pytest.raises(FlashRLError, match=r"the sum failed \(exit code 1\)") as error:
        engine_process.ask("answering", "sum", {"numbers": [], "seconds": 0.0}, tmp_path, title="the sum")
    assert "--numbers is empty" in str(error.value) and str(tmp_path / "sum.log") in str(error.value)
