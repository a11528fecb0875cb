# SPDX-License-Identifier: Apache-2.0
"""A process that is asked: its answer or its error comes back, nothing of it stays, and the waiting does not disturb it."""

import time
from pathlib import Path

import psutil
import pytest

from flashrl_verl.bench import engine_process
from flashrl_verl.errors import FlashRLError

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"


@pytest.fixture(autouse=True)
def _programs_are_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{PROGRAMS}:{engine_process.ROOT}")


def ended(pid: int) -> bool:
    """A zombie has ended too: it waits for whoever adopted it to take note."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_answer_comes_back_without_reading_memory_and_nothing_stays(tmp_path, monkeypatch):
    def read(process):
        raise AssertionError("memory_full_info walks the page tables of what is being timed")

    monkeypatch.setattr(psutil.Process, "memory_full_info", read)
    looks = []
    monkeypatch.setattr("flashrl_verl.process_tree._CHILDREN_S", 1.0)  # within the child's parent's life
    monkeypatch.setattr("flashrl_verl.process_tree.GRACE", 0.5)
    job = {"numbers": [1, 2, 4], "seconds": 3.0}
    answer = engine_process.ask("answering", "sum", job, tmp_path, meanwhile=lambda: looks.append(time.monotonic()))
    assert answer == {"total": 7, "folder": str(tmp_path)} and len(looks) > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "sum.log"]
    assert ended(int((tmp_path / "child").read_text()))


def jobs(*numbers: list[int], seconds: float) -> list[engine_process.Question]:
    return [
        engine_process.Question(key=i, name=f"sum{i}", job={"numbers": n, "seconds": seconds}) for i, n in enumerate(numbers)
    ]


def test_as_many_are_asked_at_a_time_as_there_are_places(tmp_path, monkeypatch):
    monkeypatch.setattr("flashrl_verl.process_tree.GRACE", 0.2)
    started = []

    class Tree(engine_process.ProcessTree):
        def __init__(self, command, log, env, cwd, *, memory):
            started.append((Path(command[3]).name, env.get("CUDA_VISIBLE_DEVICES"), time.monotonic()))
            super().__init__(command, log, env, cwd, memory=memory)

    monkeypatch.setattr(engine_process, "ProcessTree", Tree)
    found = dict(engine_process.answers("answering", jobs([1], [2, 3], [4], seconds=1.0), tmp_path, ("0", "1")))
    assert {key: answer["total"] for key, answer in found.items()} == {0: 1, 1: 5, 2: 4}
    assert [place for _, place, _ in started[:2]] == ["0", "1"] and started[2][1] in ("0", "1")
    assert started[1][2] - started[0][2] < 0.9 < started[2][2] - started[0][2]


def test_where_one_fails_the_others_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("flashrl_verl.process_tree.PATIENCE", ((2, 1.0), (9, 5.0)))
    asked = engine_process.answers("answering", jobs([], [5], seconds=600.0), tmp_path, ("0", "1"))
    with pytest.raises(FlashRLError, match="sum0 failed"):
        next(asked)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path / "sum1.job.json") in (p.info["cmdline"] or [])]


def test_an_error_comes_back_with_its_message_and_the_log(tmp_path):
    with pytest.raises(FlashRLError, match=r"the sum failed \(exit code 1\)") as error:
        engine_process.ask("answering", "sum", {"numbers": [], "seconds": 0.0}, tmp_path, title="the sum")
    assert "--numbers is empty" in str(error.value) and str(tmp_path / "sum.log") in str(error.value)
