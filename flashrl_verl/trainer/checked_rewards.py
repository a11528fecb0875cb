# SPDX-License-Identifier: Apache-2.0
"""What a reward returns is looked at where it is computed, and the driver is told of what cannot be a reward.

verl takes a NaN into the advantages, whose gradient it then skips in every step; and the response of a reward that
raises goes missing from its group, which is filled up with rows of padding. Here such a response counts as one without
a reward, and how many there may be is a setting.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.reward import resolve_reward_manager_cls

from flashrl_verl.errors import RewardError

log = logging.getLogger("verl.flashrl")

_MANAGER = "reward.reward_manager"
_CHECKED = "reward.checked_manager"
"""Where the reward manager of the configuration is kept."""
_SHOWN = 300
"""Characters of the ends of a prompt and of a response."""
_INTERVAL_S = 5.0
"""Between two looks of the driver."""

METRIC = "flashrl/failed_rewards"
"""Share of a step's responses whose reward failed, validation's too."""


class Failures(NamedTuple):
    """Of a worker since it was asked last."""

    scored: int
    failed: int
    example: str
    """The last one, in words."""


def shown(decode: Callable[[Any], str], prompt: Any, response: Any, reward_model: Any) -> str:
    """A response, in words.

    Args:
        decode: makes text of token ids.
        prompt, response: token ids.
        reward_model: of the row; its ``ground_truth`` is told.
    """
    ends = [decode(ids)[-_SHOWN:] for ids in (prompt, response)]
    truth = (reward_model or {}).get("ground_truth")
    return f"Its prompt ends: {ends[0]!r}. Its response ends: {ends[1]!r}. It should have come to {truth!r}"


def check_rewards(config: DictConfig) -> None:
    """Have verl's reward workers load ``CheckedRewardManager`` around the manager of the configuration, in place."""
    own = OmegaConf.select(config, _MANAGER)
    with open_dict(config):
        OmegaConf.update(config, _CHECKED, own, force_add=True)
        ours = {"source": "importlib", "module": {"path": f"pkg://{__name__}", "name": own.name}}
        OmegaConf.update(config, _MANAGER, ours, force_add=True)


class CheckedRewardManager(RewardManagerBase):
    """The manager of the configuration. Where it raises, or returns something other than a finite number, the reward
    is 0, and ``take`` tells."""

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Any, **kwargs: Any):
        super().__init__(config, tokenizer, compute_score)
        own = {"reward": {"reward_manager": config.reward.checked_manager}}
        manager = resolve_reward_manager_cls(OmegaConf.create(own))
        self._manager = manager(config=config, tokenizer=tokenizer, compute_score=compute_score, **kwargs)
        self._metric = OmegaConf.select(config, "algorithm.filter_groups.metric")
        self._failures = Failures(0, 0, "")

    async def run_single(self, data: DataProto) -> dict:
        problem = None
        try:
            result = await self._manager.run_single(data)
            problem = self._problem(result)
        except Exception as error:  # noqa: BLE001 - a user's function raises anything
            log.exception("[flashrl] a reward failed")
            problem = f"it raised {type(error).__name__}: {error}"
        scored, failed, example = self._failures
        if problem is None:
            self._failures = Failures(scored + 1, failed, example)
            # "reward" is verl's name for the reward itself, and it puts both into one list.
            result.get("reward_extra_info", {}).pop("reward", None)
            return result
        self._failures = Failures(scored + 1, failed + 1, f"{problem}. {self._described(data[-1])}")
        extra = {"acc": 0.0} | ({self._metric: 0.0} if self._metric not in (None, "reward") else {})
        return {"reward_score": 0.0, "reward_extra_info": extra}

    def take(self) -> Failures:
        """What there was since the last call."""
        taken, self._failures = self._failures, Failures(0, 0, "")
        return taken

    def _problem(self, result: dict) -> str | None:
        values = {"reward": result["reward_score"]}
        extra = result.get("reward_extra_info", {})
        values |= {name: extra[name] for name in ("acc", self._metric) if name in extra}
        for name, value in values.items():
            if value is None or isinstance(value, str | bytes):
                return f"its {name} is {value!r}"
            if not math.isfinite(value):
                return f"its {name} is {float(value)}"
        return None

    def _described(self, item: Any) -> str:
        prompts, responses, mask = (item.batch[name] for name in ("prompts", "responses", "attention_mask"))
        width = prompts.shape[-1]
        prompt, response = prompts[mask[:width].bool()], responses[mask[width:].bool()]
        return shown(self.tokenizer.decode, prompt, response, item.non_tensor_batch.get("reward_model"))


def __getattr__(name: str) -> type[CheckedRewardManager]:
    # verl asks a module for a class of the manager's name, which stays what the user wrote.
    if name.startswith("__"):
        raise AttributeError(name)
    return CheckedRewardManager


def _take(worker: Any) -> Failures:
    return worker.reward_manager.take()


class RewardWatch:
    """The driver's side.

    Args:
        workers: verl's reward workers.
        reward: the function, for messages.
        limit: ``flashrl.failed_rewards_max``. Until the first step has its batch, none may fail.
    """

    def __init__(self, workers: Sequence[ray.actor.ActorHandle], reward: str, limit: float):
        self._workers, self._reward, self._limit = workers, reward, limit
        self._first, self._next = True, time.monotonic() + _INTERVAL_S
        self._scored = self._failed = 0
        self._example = ""

    def look(self) -> None:
        """To be called while waiting, however often.

        Raises:
            RewardError: one of the first batch failed.
        """
        if time.monotonic() >= self._next:
            self._ask()
            self._next = time.monotonic() + _INTERVAL_S

    def end_step(self) -> dict[str, float]:
        """When a batch is there: its metric.

        Raises:
            RewardError: more than the limit failed.
        """
        self._ask()
        self._first = False
        share = self._failed / max(1, self._scored)
        if share > self._limit:
            self._refuse(f"more than flashrl.failed_rewards_max={self._limit:g} of a step")
        self._scored = self._failed = 0
        return {METRIC: share}

    def _ask(self) -> None:
        for found in ray.get([worker.__ray_call__.remote(_take) for worker in self._workers]):
            self._scored, self._failed = self._scored + found.scored, self._failed + found.failed
            self._example = found.example or self._example
        if self._first and self._failed:
            self._refuse("of the first batch none may")

    def _refuse(self, why: str) -> None:
        raise RewardError(
            f"the reward ({self._reward}) failed for {self._failed} of {self._scored} responses, {why}. Of one of them "
            f"{self._example}. Remedy: a reward function that returns a finite number for every response, such as 0 "
            "for what it cannot judge in time; of a data_source that verl does not know, one of your own "
            "(reward.custom_reward_function.path)"
        )
