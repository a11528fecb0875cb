# SPDX-License-Identifier: Apache-2.0
"""The schedule of `flashrl bench learning`, with runs that only count (`counting_run.py`): processes, records,
metrics."""

import json
import os
import signal
import sys
import threading
import time

import psutil
import pytest
from learning_runs import KEY, PROGRAM, STEPS, Seen, carry_out, config, limits, write_metrics, write_record
from omegaconf import OmegaConf
from rich.console import Console

from benchmarks.learning import arms_of
from benchmarks.learning_board import Board, summary, what_is_left
from benchmarks.learning_run import Attempt, Status, process_of, state_of, states_of, stop_all
from benchmarks.learning_schedule import Event, Schedule
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.tools.process_tree import Stopped
from flashrl_verl.tools.run_directory import LATEST


@pytest.fixture
def runs(tmp_path):
    return config(tmp_path).runs()


def states(runs):
    return [state_of(run, STEPS).status for run in runs]


def test_all_runs_are_finished_and_never_more_at_a_time_than_allowed(runs):
    seen = carry_out(runs, limits())
    assert states(runs) == [Status.FINISHED] * 4
    assert seen.of(Event.STARTED) == [run.name for run in runs] and set(seen.of(Event.FINISHED)) == {
        r.name for r in runs
    }
    assert seen.most == 2
    record = json.loads((runs[3].folder / "run.json").read_text())
    assert record["seed"] == 1 and record["attempts"][-1]["exit_code"] == 0 and "error" not in record["attempts"][-1]


def test_what_is_finished_is_not_started_again(runs):
    carry_out(runs[:2], limits())
    before = (runs[0].folder / "metrics.jsonl").read_bytes()
    seen = carry_out(runs, limits())
    assert seen.of(Event.STARTED) == [run.name for run in runs[2:]]
    assert (runs[0].folder / "metrics.jsonl").read_bytes() == before


def test_starts_are_staggered(runs):
    seen = carry_out(runs[:3], limits(parallel=3, stagger_s=0.3))
    gaps = [b - a for a, b in zip(seen.starts, seen.starts[1:], strict=False)]
    assert len(gaps) == 2 and min(gaps) >= 0.25  # seen a little later than they are made


def test_nothing_is_started_when_too_little_time_is_left(runs):
    seen = carry_out(runs, limits(seconds=10, start_s=5, ending_s=6))
    assert not seen.news and states(runs) == [Status.NEW] * 4


def test_runs_that_are_begun_go_on_before_others_begin(runs):
    carry_out([runs[3]], limits(), fails={runs[3].name: ["3", "once"]})
    (runs[3].folder / "metrics.jsonl").write_text("")  # as if it had been stopped in its first step
    seen = carry_out(runs, limits(parallel=1))
    assert seen.of(Event.STARTED)[0] == runs[3].name


def test_a_failed_run_ends_no_other_and_is_tried_once_more(runs):
    name = runs[1].name
    seen = carry_out(runs, limits(), fails={name: ["3"]})
    assert states(runs) == [Status.FINISHED, Status.FAILED, Status.FINISHED, Status.FINISHED]
    assert seen.of(Event.FAILED) == [name, name] and seen.of(Event.STARTED).count(name) == 2
    state = state_of(runs[1], STEPS)
    assert state.error == ("ValueError: step 3 is not to be",)
    assert not carry_out(runs, limits()).news, "a third time"
    again = carry_out(runs, limits(), fails={name: ["3"]}, retry=True)
    assert again.of(Event.FAILED) == [name] and again.of(Event.STARTED) == [name]
    assert carry_out(runs, limits(), fails={}, retry=True).of(Event.FINISHED) == [name]


def test_a_run_that_fails_once_is_finished_by_the_second_try(runs):
    name = runs[0].name
    seen = carry_out(runs[:1], limits(), fails={name: ["3", "once"]})
    assert [event for _, event in seen.news] == [Event.STARTED, Event.FAILED, Event.STARTED, Event.FINISHED]
    assert "starts at 2" in (runs[0].folder / "train.log").read_text()


def scripted(runs, bounds, script):
    """Schedule runs that are one line of Python."""

    def prepare(_):
        return [sys.executable, "-c", script], {}, OmegaConf.create({})

    seen = Seen()
    Schedule(runs, STEPS, bounds, prepare, seen.tell, seen.watch).carry_out()
    return seen


def test_a_fault_before_the_first_step_of_two_runs_stops_everything_where_none_has_trained(runs):
    with pytest.raises(
        FlashRLError, match="bf16:none seed 0, int8:tis seed 0 failed before their first step, as any run"
    ):
        scripted(runs, limits(parallel=1), "raise ValueError('no such file')")
    assert states(runs) == [Status.UNFINISHED] * 2 + [Status.NEW] * 2, "the same command tries again"
    assert state_of(runs[0], STEPS).error == ("ValueError: no such file",)


def test_a_run_that_fails_first_ends_none_that_is_still_starting(runs):
    """The first one fails at once, as one that found no memory; the others take a while to their first step."""
    seen = Seen()

    def prepare(run):
        fails = run == runs[0] and not seen.of(Event.FAILED)
        words = (
            ["-c", "raise ValueError('no port')"] if fails else [str(PROGRAM), str(run.folder), str(STEPS), "0.5", "0"]
        )
        return [sys.executable, *words], {}, OmegaConf.create({})

    Schedule(runs, STEPS, limits(parallel=3), prepare, seen.tell, seen.watch).carry_out()
    assert seen.of(Event.FAILED) == [runs[0].name] and states(runs) == [Status.FINISHED] * 4


def test_second_tries_wait_until_another_run_has_trained_where_two_failed(runs):
    """Two of the first three fail at once; the others log their first step a second after their start."""
    seen, began = Seen(), []

    def prepare(run):
        again = run.name in dict(began)
        began.append((run.name, any(state_of(one, STEPS).step for one in runs)))
        words = [str(PROGRAM), str(run.folder), str(STEPS), "1.0", "0"]
        fails = run in runs[:2] and not again
        return [sys.executable, *(["-c", "raise ValueError('no port')"] if fails else words)], {}, OmegaConf.create({})

    Schedule(runs, STEPS, limits(parallel=3), prepare, seen.tell, seen.watch).carry_out()
    assert states(runs) == [Status.FINISHED] * 4 and sorted(seen.of(Event.FAILED)) == [run.name for run in runs[:2]]
    assert began[-2:] == [(name, True) for name in seen.of(Event.FAILED)]


def test_a_fault_before_the_first_step_is_the_runs_own_where_another_has_trained(runs):
    carry_out(runs[:1], limits())
    scripted(runs[:2], limits(), "pass")
    state = state_of(runs[1], STEPS)
    assert state.status is Status.FAILED and "before its last step without an error" in state.error[0]


def test_a_run_that_never_logs_is_ended_and_has_failed_and_the_only_one_is_tried_twice(runs):
    started = time.monotonic()
    with pytest.raises(FlashRLError, match=r"bf16:none seed 0 \(2 times\) failed before its first step.*--retry"):
        scripted(runs[:1], limits(first_s=1.0), "import time; print('hello', flush=True); time.sleep(99)")
    assert time.monotonic() - started < 30
    assert state_of(runs[0], STEPS).error == (
        "ended: it had not logged its first step for 1 s (--first-step-limit)",
        "hello",
    )
    assert process_of(runs[0].folder) is None


def test_a_run_that_stops_logging_is_ended_and_goes_on_from_its_checkpoint(runs):
    write_metrics(runs[0], {0: {}, 1: {}, 2: {}, 3: {}})
    (runs[0].folder / "checkpoints").mkdir()
    (runs[0].folder / "checkpoints" / LATEST).write_text("2")
    seen = carry_out(runs[:1], limits(between_s=0.6, first_s=60.0), seconds="50")
    assert [event for _, event in seen.news] == [Event.STARTED, Event.FAILED] * 2
    state = state_of(runs[0], STEPS)
    assert state.error == ("ended: it had not logged another step for 1 s (--step-limit)", "starts at 2")
    assert state.resumes_at == 2


def test_a_run_that_a_killed_command_left_behind_is_not_started_beside_it(runs):
    words = ["--wait", str(runs[1].folder)]
    left = Attempt(runs[1], [sys.executable, "-c", "import time; time.sleep(99)", *words], {}, OmegaConf.create({}))
    pid = process_of(runs[1].folder)
    try:
        with pytest.raises(ConfigError, match=f"int8:tis seed 0 is going on as process {pid}.*kill -INT {pid}"):
            carry_out(runs, limits())
    finally:
        stop_all([left])
    assert process_of(runs[1].folder) is None
    assert set(carry_out(runs, limits()).of(Event.FINISHED)) == {run.name for run in runs}


def test_ctrl_c_ends_what_runs_and_counts_no_failure(runs):
    timer = threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(Stopped) as stopped:
        carry_out(runs, limits(), seconds="30")
    timer.join()
    assert stopped.value.exit_code == 130
    assert states(runs[:2]) == [Status.UNFINISHED] * 2 and state_of(runs[0], STEPS).failures == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(runs[0].folder) in (p.info["cmdline"] or [])]


def test_ending_several_takes_no_longer_than_ending_one(tmp_path):
    """Each takes two seconds to end: it ignores SIGINT for so long."""
    cfg = config(tmp_path, arms=arms_of("bf16:none,int8:none,fp8:none"), seeds=(0, 1))
    stubborn = (
        "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: (time.sleep(2), sys.exit(0))); "
        "time.sleep(99)"
    )

    def prepare(_):
        return [sys.executable, "-c", stubborn], {}, OmegaConf.create({})

    ended = []
    schedule = Schedule(
        cfg.runs(), STEPS, limits(parallel=6, seconds=4), prepare, lambda n: ended.append((n.event, time.monotonic()))
    )
    started = time.monotonic()
    schedule.carry_out()
    stops = [at for event, at in ended if event is Event.STOPPED]
    assert len(stops) == 6 and time.monotonic() - started < 4 + 4 * 2


def test_plain_lines_tell_each_run_its_step_and_its_error(runs):
    console = Console(record=True, width=200, force_terminal=False, file=open(os.devnull, "w"))
    with Board(console, STEPS) as board:
        board._spoke = float("-inf")
        seen = []

        def prepare(run):
            fails = "3" if run == runs[1] else "0"
            return [sys.executable, str(PROGRAM), str(run.folder), str(STEPS), "0.1", fails], {}, OmegaConf.create({})

        def watch(running):
            board._spoke = float("-inf")  # at every look
            board.watch(running)
            seen.extend(running)

        Schedule(runs[:2], STEPS, limits(), prepare, board.tell, watch).carry_out()
    said = console.export_text()
    assert "bf16:none seed 0: started, log in" in said and "bf16:none seed 0: finished" in said
    assert f"bf16:none seed 0: step 0/{STEPS}, accuracy 0.250 at step 0" in said
    assert "is tried once more" in said and "int8:tis seed 0: started at step 2" in said
    assert "is not tried again" in said and "  ValueError: step 3 is not to be" in said
    assert summary([state_of(run, STEPS) for run in runs]) == "2 not started, 1 failed, 1 finished"


def test_what_is_left_is_told_in_steps_and_in_minutes_at_this_commands_pace(runs):
    """Of four runs of four steps one goes on from 1 to its end (3 more), one comes to 2, one fails twice, one is not
    begun."""

    def saved(run, step):
        (run.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run.folder / "checkpoints" / LATEST).write_text(str(step))

    def told(stopped=False):
        return what_is_left(before, states_of(runs, STEPS), STEPS, 9.6, stopped=stopped)

    write_record(runs[0], {})
    saved(runs[0], 1)
    before = states_of(runs, STEPS)
    assert told() == "15 of 16 steps are left, and none was saved this time: more --minutes"
    assert told(stopped=True) == "15 of 16 steps are left, and none was saved this time"
    write_record(runs[2], {"error": ["no"]})
    assert told() == "15 of 16 steps are left, and none was saved this time"  # what went wrong is in the report
    write_record(runs[2], *[{"error": ["no"]}] * 2)
    write_metrics(runs[0], {STEPS: {KEY: 0.5}})
    saved(runs[0], STEPS)
    write_record(runs[1], {})
    saved(runs[1], 2)
    assert told() == "6 of 12 steps are left, by estimate 12 minutes at this command's pace"  # 5 steps in 9.6 minutes
    for run in runs:
        write_record(run, {})
        saved(run, STEPS)
    assert told() == "validations are left"
