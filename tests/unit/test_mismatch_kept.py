# SPDX-License-Identifier: Apache-2.0
"""What a stopped `flashrl bench mismatch` has measured, and for which question it stands."""

from dataclasses import replace

import pytest

from benchmarks.mismatch_kept import KeptAnswers, forget
from flashrl_verl.tools.engines.mismatch_engine import Answer, Job

JOB = Job(
    model="",
    precision="int8",
    kv_cache="auto",
    prompts=[[1]],
    tokens=2,
    stop_token_ids=[2],
    vocab_size=9,
    gpu_memory_utilization=None,
    seed=0,
    common=[[3]],
)
ANSWER = Answer(
    responses=[[3]],
    log_probs=[[-0.5]],
    common_log_probs=[[-0.25]],
    layers={},
    kernels={},
    updated=1,
    seconds={"start": 1.5},
)


@pytest.fixture
def job(tmp_path) -> Job:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return replace(JOB, model=str(tmp_path / "model"))


def test_an_engines_answer_is_there_after_a_stop_and_gone_after_the_report(job, tmp_path):
    KeptAnswers(tmp_path, "a GPU").keep(job, ANSWER)
    assert KeptAnswers(tmp_path, "a GPU").find(job) == ANSWER
    forget(tmp_path)
    assert KeptAnswers(tmp_path, "a GPU").find(job) is None


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"common": [[4]]},
        {"kv_cache": "int8"},
        {"precision": "bf16"},
        {"prompts": [[2]]},
        {"tokens": 3},
    ],
    ids=str,
)
def test_an_answer_to_another_question_is_not_taken(job, tmp_path, change):
    kept = KeptAnswers(tmp_path, "a GPU")
    kept.keep(job, ANSWER)
    assert kept.find(replace(job, **change)) is None


def test_an_answer_about_other_weights_or_of_another_device_is_not_taken(job, tmp_path):
    kept = KeptAnswers(tmp_path, "a GPU")
    kept.keep(job, ANSWER)
    assert KeptAnswers(tmp_path, "another GPU").find(job) is None
    (tmp_path / "model" / "model.safetensors").write_bytes(b"others!")
    assert kept.find(job) is None


def test_a_kept_answer_that_was_cut_short_is_measured_again(job, tmp_path):
    kept = KeptAnswers(tmp_path, "a GPU")
    kept.keep(job, ANSWER)
    (file,) = tmp_path.glob("*.kept.json")
    file.write_bytes(file.read_bytes()[:-9])
    assert kept.find(job) is None
