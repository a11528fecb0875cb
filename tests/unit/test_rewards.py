# SPDX-License-Identifier: Apache-2.0
"""What a reward function may return, in verl's own reward workers."""

import asyncio
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager

from flashrl_verl.errors import ResponseError
from flashrl_verl.trainer import rewards
from flashrl_verl.trainer.rewards import METRIC, RewardWatch, Scored, check_rewards


class Letters:
    """As much of a tokenizer as verl's managers ask for."""

    def decode(self, ids, **_):
        return "".join(chr(96 + int(i)) for i in ids)


def raises(error: Exception):
    raise error


async def too_late():
    return await asyncio.wait_for(asyncio.sleep(1), 0.01)


WRONG = {
    "nan": (lambda: math.nan, "its reward is nan"),
    "inf": (lambda: {"score": math.inf, "acc": 1}, "its reward is inf"),
    "accuracy of nan": (lambda: {"score": 1.0, "acc": math.nan}, "its acc is nan"),
    "text": (lambda: "1.0", r"str|'1.0'"),
    "none": (lambda: None, "None"),
    "missing key": (lambda: {"acc": 1.0}, "KeyError: 'score'"),
    "exception": (lambda: raises(ZeroDivisionError("by zero")), "it raised ZeroDivisionError: by zero"),
    "time-out": (too_late, "it raised TimeoutError"),
}
RIGHT = {
    "a number": (lambda: 1, 1),
    "numpy": (lambda: np.float32(0.5), 0.5),
    "more keys": (lambda: {"score": 1.0, "acc": True, "why": "x"}, 1.0),
}


def manager_of(reward, name: str = "dapo", filtered: bool = True):
    """As a reward worker makes it of a configuration that was checked."""
    overlong = {"enable": True, "len": 2, "penalty_factor": 1.0, "log": False}
    kwargs = {"max_resp_len": 4, "overlong_buffer_cfg": overlong}
    cfg = OmegaConf.create(
        {
            "algorithm": {"filter_groups": {"enable": filtered, "metric": "acc"}},
            "reward": {
                "custom_reward_function": {"path": None},
                "reward_manager": {"source": "register", "name": name, "module": None},
                "reward_kwargs": kwargs,
            },
        }
    )
    check_rewards(cfg)
    made = load_reward_manager(cfg, Letters())
    if asyncio.iscoroutinefunction(reward):
        made._manager.is_async_reward_score = True
        made._manager.compute_score = lambda **_: reward()
    else:
        made._manager.compute_score = lambda **_: reward()
    return made


def a_row() -> DataProto:
    tensors = {
        "prompts": torch.tensor([[0, 1, 2]]),
        "responses": torch.tensor([[3, 4, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0]]),
    }
    others = {"data_source": np.array(["mine"]), "reward_model": np.array([{"ground_truth": "42"}])}
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=others)


def score(manager) -> dict:
    return manager.loop.run_until_complete(manager.run_single(a_row()))


@pytest.mark.parametrize("name", ["dapo", "naive"])
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_number_counts_as_0_and_is_told_with_the_response(kind, name):
    reward, said = WRONG[kind]
    manager = manager_of(reward, name)
    assert score(manager) == {"reward_score": 0.0, "reward_extra_info": {"acc": 0.0}}
    [one] = manager.take()
    assert one.value == 0 and re.search(said, one.failure)
    shown = "Its prompt ends: 'ab'. Its response ends: 'cd'. It should have come to '42', of data_source mine"
    assert one.shown == shown and manager.take() == []


def test_what_verls_manager_of_judges_turns_into_0_is_told():
    manager = manager_of(WRONG["exception"][0], "rate_limited")
    assert score(manager)["reward_score"] == 0 and manager.take()[0].failure == "it ended with error=by zero"
    own = manager_of(lambda: {"score": 1.0, "error": "", "timeout": False}, "rate_limited")
    assert score(own)["reward_score"] == 1 and not own.take()[0].failure


def test_without_a_filter_a_failure_makes_no_accuracy():
    """One such response would give all of its source one."""
    manager = manager_of(WRONG["exception"][0], filtered=False)
    assert score(manager) == {"reward_score": 0.0, "reward_extra_info": {}} and manager.take()[0].failure


@pytest.mark.parametrize("kind", RIGHT)
def test_a_number_passes_as_verls_manager_made_it(kind):
    reward, number = RIGHT[kind]
    manager = manager_of(reward)
    result = score(manager)
    assert type(result["reward_score"]) is float, "Pydantic warns of a tensor, of every response"
    assert result["reward_score"] == number and result["reward_extra_info"]["acc"] == number
    [one] = manager.take()
    assert one[:2] == (number, "") and one.shown


def test_a_row_whose_mask_is_narrower_than_its_tokens_has_its_reward(monkeypatch):
    """As verl pads agent loops with several outputs."""
    row = a_row()
    row.batch["attention_mask"] = row.batch["attention_mask"][:, :4]
    manager = manager_of(RIGHT["numpy"][0], "naive")
    assert manager.loop.run_until_complete(manager.run_single(row))["reward_score"] == 0.5
    assert manager.take() == [Scored(0.5, "", "")]


def test_a_reward_that_keeps_its_worker_busy_keeps_the_driver_from_nothing(monkeypatch):
    watch = watch_of(monkeypatch, [scored(3), scored(2), scored(4), scored(1)], 0.0)
    monkeypatch.setattr(rewards.ray, "wait", lambda asked, **_: (asked[:1], asked[1:]))
    watch.ask()
    watch.ask()
    assert not watch._scored and len(watch._asked) == 2
    watch.ask(whole=True)
    assert len(watch._scored) == 10 and not watch._asked


def watch_of(monkeypatch, answers: list[list[Scored]], limit: float) -> RewardWatch:
    """Over two workers that answer in turn."""
    left = iter(answers)
    worker = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda function: next(left)))
    monkeypatch.setattr(rewards.ray, "get", list)
    monkeypatch.setattr(rewards.ray, "wait", lambda asked, **_: (asked, []))
    return RewardWatch([worker, worker], "mine", limit, batch=16)


def scored(count: int, value: float = 1.0, failure: str = "", shown: str = "") -> list[Scored]:
    return [Scored(value, failure, shown)] * count


def test_a_first_batch_fails_as_soon_as_it_is_sure_to_and_later_ones_at_their_end(monkeypatch):
    failing = [*scored(1, 0.0, "a"), *scored(2, 0.0, "b")]
    watch = watch_of(monkeypatch, [scored(8), scored(99) + failing[:1], scored(99), scored(98) + failing], 0.01)
    assert watch.end_step() == {METRIC: 1 / 108}
    with pytest.raises(
        ResponseError, match="3 of 200 responses, more than flashrl.failed_responses_max=0.01.* b. .*Remedy"
    ):
        watch.end_step()
    watch = watch_of(monkeypatch, [scored(2, 0.0, "c"), [], [], scored(3, 0.0, "c")], 0.25)
    watch.ask()  # 2 of a batch of 16
    with pytest.raises(ResponseError, match="5 of 5 responses, more than .*=0.25 of the first batch. Of one of them c"):
        watch.ask()


def test_lost_responses_are_those_of_failed_groups_that_are_not_there(monkeypatch):
    """Of groups of four: b lacks one, c all; of d nobody says that it failed, and e is not of the batch."""
    keys = ["a_0_0", "a_1_0", "a_2_0", "a_3_0", "b_0_0", "b_0_1", "b_2_0", "b_3_0", "d_1_0"]
    watch = watch_of(monkeypatch, [[], [], scored(7), scored(4), [], []], 0.3)
    assert watch.count_lost("abcd", {"b", "c", "e"}, keys, each=4) and watch.count_lost("ffff", [], [], each=4)
    watch.end_validation()  # of several batches: 5 of 32
    watch.count_lost("abcd", {"b"}, keys, each=4)
    assert watch.end_step() == {METRIC: 1 / 12}, "validation's are not a step's"
    for end in (watch.end_validation, watch.end_step):
        watch.count_lost("abcd", {"b", "c"}, keys, each=4)
        with pytest.raises(ResponseError, match=r"\d+ of \d+ responses ended with an error, more than .*_max=0.3 "):
            end()
    watch = watch_of(monkeypatch, [], 1.0)
    assert not watch.count_lost("ab", {"a", "b"}, [], each=4)
    with pytest.raises(ResponseError, match="8 of 8 responses"):  # verl has nothing to go on with
        watch.check_lost(nothing=True)


@pytest.mark.usefixtures("logged")
def test_that_no_response_has_had_a_reward_is_said_once(monkeypatch, caplog):
    none = [scored(count, 0.0, shown=shown) for count, shown in ((8, "a"), (7, "b"), (9, "c"), (8, "d"))]
    watch = watch_of(monkeypatch, [*none, [], []], 1.0)
    watch.ask()  # 15 of a batch of 16 may be unlucky
    assert not caplog.records and watch.unrewarded
    watch.ask()
    watch.ask(whole=True)
    assert [record.getMessage()[:39] for record in caplog.records] == ["none of 32 responses has had a reward ("]
    assert "(mine)" in caplog.text and "One: a." in caplog.text

    caplog.clear()
    for other in (-1.0, 1.0):
        watch = watch_of(monkeypatch, [none[0], scored(1, other), *none[2:]], 1.0)
        watch.end_validation()
        assert not caplog.records and not watch.unrewarded
    watch.ask()  # what validation had says nothing of training
    assert watch.unrewarded and "none of 17 responses" in caplog.text

    for none in (scored(15, -1.0) + scored(1, 0.0, "late"), scored(16, 0.0, "late")):  # a failure's 0 is no reward
        caplog.clear()
        watch_of(monkeypatch, [none, []], 1.0).ask()
        assert "none of 16 responses" in caplog.text
