# SPDX-License-Identifier: Apache-2.0
"""What a folder made of a checkpoint is called when nobody names it: another checkpoint's folder must not have that
name."""

from pathlib import Path

import pytest

from flashrl_verl.tools.export.source import Checkpoint


def name_of(path: str, ranks: int | None) -> str:
    return Checkpoint(path=Path(path), folder=Path(path), ranks=ranks, step=None, settings=None, config={}).name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/dapo-32b-int8/global_step_100/actor", "dapo-32b-int8-global_step_100"),
        ("outputs/quickstart/checkpoints/global_step_30/actor", "quickstart-global_step_30"),
        ("outputs/quickstart/previous-1/checkpoints/global_step_30/actor", "quickstart-previous-1-global_step_30"),
        ("outputs/other/previous-1/checkpoints/global_step_30/actor", "other-previous-1-global_step_30"),
        ("runs/previous-work/global_step_3", "previous-work-global_step_3"),
        ("global_step_7", "here-global_step_7"),  # as `flashrl eval global_step_7` is asked inside a run's folder
        ("/global_step_7", "global_step_7"),
        ("saved/actor", "saved"),
    ],
)
def test_the_steps_of_two_runs_have_names_of_their_own(tmp_path, monkeypatch, path, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert name_of(path, ranks=2) == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Qwen2.5-7B", "Qwen2.5-7B"),
        ("outputs/quickstart/checkpoints/global_step_30/actor/huggingface", "quickstart-global_step_30-huggingface"),
        ("runs/dapo/previous-2/global_step_4/huggingface", "dapo-previous-2-global_step_4-huggingface"),
        ("models/Qwen2.5-7B/huggingface", "Qwen2.5-7B-huggingface"),
        ("/huggingface", "huggingface"),
    ],
)
def test_a_hugging_face_folder_has_its_own_name_or_that_of_what_it_lies_in(path, name):
    assert name_of(path, ranks=None) == name
