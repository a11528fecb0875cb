# SPDX-License-Identifier: Apache-2.0
"""How `flashrl bench learning` ends what still runs when its time is over, or nearly."""

import json
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from learning_runs import PROGRAM, STEPS, Seen, carry_out, config, limits, write_metrics
from omegaconf import OmegaConf

from benchmarks.learning_run import Status, state_of
from benchmarks.learning_schedule import Event, Schedule
from flashrl_verl.tools.run_directory import LATEST


@pytest.fixture
def runs(tmp_path):
    return config(tmp_path).runs()


def test_what_runs_when_time_is_over_is_ended_and_goes_on_from_its_checkpoint(runs):
    (run,) = runs[:1]
    started = time.monotonic()
    # Long enough for a Python to start and two steps, on a busy machine too; never for four.
    seen = carry_out([run], limits(seconds=4.5), seconds="1.2")
    assert time.monotonic() - started < 30 and seen.of(Event.STOPPED) == [run.name]
    state = state_of(run, STEPS)
    assert state.status is Status.UNFINISHED and state.failures == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(run.folder) in (p.info["cmdline"] or [])]
    at = state.resumes_at
    carry_out([run], limits())
    assert state_of(run, STEPS).status is Status.FINISHED
    log = (run.folder / "train.log").read_text()
    assert log.count("---- attempt") == 2 and log.endswith(f"starts at {at}\n")
    assert len(json.loads((run.folder / "run.json").read_text())["attempts"]) == 2


def test_a_run_ends_at_its_next_checkpoint_when_time_is_nearly_over(runs):
    """Two steps a checkpoint: it is stopped right behind the second one, long before the time is over, but not before
    the figures of that step are there: it would go on behind it, without them."""
    program = [sys.executable, str(PROGRAM), str(runs[0].folder), "100", "0.4", "0"]
    seen = Seen()
    schedule = Schedule(
        runs[:1],
        100,
        limits(seconds=60, closing_s=60),
        lambda run: (program, {}, OmegaConf.create({})),
        seen.tell,
        seen.watch,
    )
    started = time.monotonic()
    schedule.carry_out()
    state = state_of(runs[0], 100)
    assert seen.of(Event.STOPPED) == [runs[0].name] and time.monotonic() - started < 30
    assert state.failures == 0 and state.resumes_at >= 2 and 0 <= state.step - state.resumes_at <= 1


def test_a_run_that_has_saved_when_time_is_nearly_over_ends_when_it_has_logged_that(runs):
    schedule = Schedule(runs[:1], 100, limits(), lambda run: ([], {}, OmegaConf.create({})))
    stops = []
    schedule._going = [
        SimpleNamespace(run=runs[0], checkpoint=None, stop=lambda: stops.append(state_of(runs[0], 100).step))
    ]
    write_metrics(runs[0], {0: {}, 1: {}})
    (runs[0].folder / "checkpoints").mkdir()
    (runs[0].folder / "checkpoints" / LATEST).write_text("2")
    schedule._close()
    schedule._close()
    assert not stops, "step 2 is validated, and not logged yet"
    write_metrics(runs[0], {0: {}, 1: {}, 2: {}})
    schedule._close()
    assert stops == [2]


def test_a_run_that_has_saved_and_logged_when_time_is_nearly_over_may_go_on_to_its_next_checkpoint(runs):
    schedule = Schedule(runs[:1], 100, limits(), lambda run: ([], {}, OmegaConf.create({})))
    stops = []
    schedule._going = [
        SimpleNamespace(run=runs[0], checkpoint=None, stop=lambda: stops.append(state_of(runs[0], 100).step))
    ]
    (runs[0].folder / "checkpoints").mkdir(parents=True)
    for step in range(2, 5):
        write_metrics(runs[0], {done: {} for done in range(step + 1)})
        (runs[0].folder / "checkpoints" / LATEST).write_text(str(step - step % 2))
        schedule._close()
        assert stops == ([4] if step == 4 else [])
