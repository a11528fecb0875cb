# SPDX-License-Identifier: Apache-2.0
"""The guard's counts survive a resume, and it knows the checkpoint to resume from."""

import json
import logging

import pytest
from guard_steps import CODES, K3, REFITTED, TRAINED, guard_of, step_of

from flashrl_verl.errors import FlashRLError, GuardError
from flashrl_verl.guard import STATE_FILE
from flashrl_verl.guard_watches import Moment


def test_a_resumed_run_continues_the_counts_and_the_events(tmp_path, logged):
    folder = tmp_path / "global_step_2"
    before = guard_of(patience=3)
    for step in (1, 2):
        step_of(before, step, folder if step == 2 else None, k3_kl=1.0, code_change_rate=0.0)
    assert not logged(logging.WARNING)
    after = guard_of(patience=3)
    after.load(folder)
    assert after.metrics() == before.metrics()
    step_of(after, 3, k3_kl=1.0)
    (text,) = logged(logging.WARNING)
    assert text.startswith("step 3: ") and "k3_kl=1 " in text and "for 3 steps" in text
    assert after.metrics()["flashrl/guard_events"] == 1 and after.metrics()["flashrl/guard_code_change_rate_steps"] == 0


def test_what_the_refit_of_the_saved_step_showed_is_in_its_checkpoint_and_later_steps_are_not(tmp_path):
    folder = tmp_path / "global_step_1"
    guard = guard_of(patience=10)
    step_of(guard, 1, folder, code_change_rate=0.0)
    step_of(guard, 2, code_change_rate=0.0)
    assert json.loads((folder / STATE_FILE).read_text())["steps"]["code_change_rate"] == 1
    assert [path.name for path in folder.iterdir()] == [STATE_FILE], "nothing half-written is left"


def test_an_episode_that_was_told_is_not_told_again_after_a_resume_but_stops_a_run_that_now_stops(tmp_path, logged):
    before = guard_of(patience=2)
    for step in (1, 2):
        step_of(before, step, k3_kl=1.0)
    before.save(tmp_path)
    assert len(logged(logging.WARNING)) == 1
    same = guard_of(patience=2)
    same.load(tmp_path)
    step_of(same, 3, k3_kl=1.0)
    assert len(logged(logging.WARNING)) == 1 and same.metrics()["flashrl/guard_events"] == 1
    strict = guard_of(patience=2, action="stop")
    strict.load(tmp_path)
    with pytest.raises(GuardError, match="step 3: .*for 3 steps"):
        step_of(strict, 3, k3_kl=1.0)


def test_a_shorter_patience_after_a_resume_applies_to_the_count_so_far(tmp_path, logged):
    before = guard_of(patience=5)
    for step in (1, 2, 3):
        step_of(before, step, k3_kl=1.0)
    before.save(tmp_path)
    after = guard_of(patience=2)
    after.load(tmp_path)
    step_of(after, 4, k3_kl=1.0)
    assert len(logged(logging.WARNING)) == 1 and "for 4 steps" in logged(logging.WARNING)[0]


def test_a_checkpoint_from_before_there_was_a_guard_starts_the_count(tmp_path):
    guard = guard_of()
    guard.load(tmp_path)
    assert set(guard.metrics().values()) == {0}


def test_counts_of_a_metric_that_is_no_longer_watched_are_dropped(tmp_path):
    before = guard_of(patience=5)
    step_of(before, 1, k3_kl=1.0)
    before.save(tmp_path)
    after = guard_of(k3_kl_max=None)
    after.load(tmp_path)
    assert "flashrl/guard_k3_kl_steps" not in after.metrics()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": {}}', '{"steps": {"k3_kl": "x"}, "told": [], "events": 0}'])
def test_a_damaged_file_of_counts_is_refused_by_its_name(tmp_path, text):
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(FlashRLError, match=f"{STATE_FILE} is damaged.*Remove it"):
        guard_of().load(tmp_path)


# ---- the checkpoint to go back to ----


def _stopped(guard, moment: Moment, step: int) -> str:
    metrics = {**TRAINED, K3: 1.0} if moment is Moment.TRAINED else {**TRAINED, **REFITTED, CODES: 0.0}
    with pytest.raises(GuardError) as caught:
        guard.look(moment, step, metrics)
    return str(caught.value)


@pytest.mark.parametrize("moment", list(Moment))
def test_a_stop_without_a_checkpoint_says_so_and_names_the_setting(moment):
    guard = guard_of(action="stop", patience=1)
    step_of(guard, 1)
    text = _stopped(guard, moment, 2)
    assert "No checkpoint was saved so far (trainer.save_freq=-1: none ever is)" in text and "esume from" not in text


@pytest.mark.parametrize("moment", list(Moment))
def test_a_stop_names_the_last_checkpoint_of_this_run(moment, tmp_path):
    guard = guard_of(action="stop", patience=1)
    for step in (1, 2, 3):
        step_of(guard, step, tmp_path / f"global_step_{step}" if step < 3 else None)
    text = _stopped(guard, moment, 4)
    assert f"esume from {tmp_path}/global_step_2, or go on regardless" in text and "global_step_1" not in text
    assert ("No checkpoint was saved from this step" in text) is (moment is Moment.TRAINED)


def test_a_step_is_saved_when_verls_save_has_ended_which_the_refit_comes_after(tmp_path):
    guard = guard_of(action="stop", patience=1)
    step_of(guard, 1, tmp_path / "global_step_1")
    guard.look(Moment.TRAINED, 2, TRAINED)
    guard.save(tmp_path / "global_step_2")  # as verl's own save ends, the step is whole, whatever its refit shows
    assert f"Resume from {tmp_path}/global_step_2," in _stopped(guard, Moment.REFITTED, 2)


def test_a_run_stopped_right_after_a_resume_names_the_checkpoint_that_it_came_from(tmp_path):
    for made_by_a_guard in (True, False):
        folder = tmp_path / f"global_step_{5 + made_by_a_guard}"
        if made_by_a_guard:
            step_of(guard_of(), 6, folder)
        guard = guard_of(action="stop", patience=1)
        guard.load(folder)
        assert f"resume from {folder}, or go on" in _stopped(guard, Moment.TRAINED, 7)


def test_a_checkpoint_is_not_taken_for_that_of_a_later_step(tmp_path):
    guard = guard_of(action="stop", patience=1)
    step_of(guard, 1, tmp_path / "global_step_1")
    saved = (tmp_path / "global_step_1" / STATE_FILE).stat().st_mtime_ns
    step_of(guard, 2)
    assert (tmp_path / "global_step_1" / STATE_FILE).stat().st_mtime_ns == saved, "written again by a later step"
