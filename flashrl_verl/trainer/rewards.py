# SPDX-License-Identifier: Apache-2.0
"""What a reward returns is looked at where it is computed, and the driver is told.

verl takes a NaN into the advantages, whose gradient it then skips in every step; and the response of a reward that
raises goes missing from its group, which is filled up with rows of padding. Here such a response counts as one without
a reward, and how many there may be is a setting.

A model that answers in another form than the reward looks for never gets one: every group is constant, dynamic sampling
replaces all of them, and a run would sample to its bound without a word of why. Here a warning shows a response.
"""

import logging
import math
import time
from collections.abc import Sequence
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


class Seen(NamedTuple):
    """Of responses, by a worker since it was asked last, or by all of them."""

    scored: int = 0
    failed: int = 0
    failure: str = ""
    """The last one, in words."""
    least: float = math.inf
    most: float = -math.inf
    """Accuracy, or the reward where there is none: the penalty of length varies without any reward."""
    first: str = ""
    """The first one, in words."""

    def __add__(self, other: "Seen") -> "Seen":
        return Seen(
            self.scored + other.scored,
            self.failed + other.failed,
            other.failure or self.failure,
            min(self.least, other.least),
            max(self.most, other.most),
            self.first or other.first,
        )


def check_rewards(config: DictConfig) -> None:
    """Have verl's reward workers load ``CheckedRewardManager`` around the manager of the configuration, in place."""
    with open_dict(config):
        OmegaConf.update(config, _CHECKED, OmegaConf.select(config, _MANAGER), force_add=True)
        module = {"path": f"pkg://{__name__}", "name": None}
        ours = {"source": "importlib", "name": CheckedRewardManager.__name__, "module": module}
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
        self._seen = Seen()

    async def run_single(self, data: DataProto) -> dict:
        try:
            result = await self._manager.run_single(data)
            problem = self._problem(result)
        except Exception as error:  # noqa: BLE001 - a user's function raises anything
            log.exception("[flashrl] a reward failed")
            problem = f"it raised {type(error).__name__}: {error}"
        if problem is not None:
            extra = {"acc": 0.0} | ({self._metric: 0.0} if self._metric not in (None, "reward") else {})
            result = {"reward_score": 0.0, "reward_extra_info": extra}
        extra = result.get("reward_extra_info", {})
        extra.pop("reward", None)  # verl's name for the reward itself, and it puts both into one list
        value = float(extra.get("acc", result["reward_score"]))
        shown = self._shown(data[-1]) if problem or not self._seen.first else ""
        self._seen += Seen(1, bool(problem), f"{problem}. {shown}" if problem else "", value, value, shown)
        return result

    def take(self) -> Seen:
        """What there was since the last call."""
        taken, self._seen = self._seen, Seen()
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

    def _shown(self, item: Any) -> str:
        prompts, responses, mask = (item.batch[name] for name in ("prompts", "responses", "attention_mask"))
        width, row = prompts.shape[-1], item.non_tensor_batch
        of_tokens = (prompts[mask[:width].bool()], responses[mask[width:].bool()])
        prompt, response = (self.tokenizer.decode(ids)[-_SHOWN:] for ids in of_tokens)
        truth = (row.get("reward_model") or {}).get("ground_truth")
        shown = f"Its prompt ends: {prompt!r}. Its response ends: {response!r}. It should have come to {truth!r}"
        return f"{shown}, of data_source {row.get('data_source')}"


def _take(worker: Any) -> Seen:
    return worker.reward_manager.take()


class RewardWatch:
    """The driver's side.

    Args:
        workers: verl's reward workers.
        reward: the function, for messages.
        limit: ``flashrl.failed_rewards_max``. Until the first step has its batch, none may fail.
        batch: responses, after which at the latest one should have had a reward.
    """

    def __init__(self, workers: Sequence[ray.actor.ActorHandle], reward: str, limit: float, batch: int):
        self._workers, self._reward, self._limit, self._batch = workers, reward, limit, batch
        self._first, self._next = True, time.monotonic() + _INTERVAL_S
        self._seen, self._said = Seen(), False
        self.unrewarded = False
        """Whether no response has had a reward yet, of validation or training."""

    def look(self) -> None:
        """To be called while waiting, however often.

        Raises:
            RewardError: one of the first batch failed.
        """
        if time.monotonic() >= self._next:
            self.ask()
            self._next = time.monotonic() + _INTERVAL_S

    def end_validation(self) -> None:
        """When it is there: say whether none of its responses has had a reward.

        Raises:
            RewardError: one of the first failed.
        """
        self.ask(whole=True)
        if self._first:
            self._seen = Seen()

    def end_step(self) -> dict[str, float]:
        """When a batch is there: its metric.

        Raises:
            RewardError: more than the limit failed.
        """
        self.ask(whole=True)
        self._first = self.unrewarded = False
        share = self._seen.failed / max(1, self._seen.scored)
        if share > self._limit:
            self._refuse(f"more than flashrl.failed_rewards_max={self._limit:g} of a step")
        self._seen = Seen()
        return {METRIC: share}

    def ask(self, whole: bool = False) -> None:
        """Now, and say whether there is no reward.

        Args:
            whole: say it of fewer responses than a batch too.

        Raises:
            RewardError: one of the first batch failed.
        """
        asked = ray.get([worker.__ray_call__.remote(_take) for worker in self._workers])
        self._seen = seen = sum(asked, self._seen)
        if not self._first:
            return
        if seen.failed:
            self._refuse("of the first batch none may")
        self.unrewarded = seen.least == seen.most <= 0  # none seen: infinity on either side
        if self.unrewarded and not self._said and (whole or seen.scored >= self._batch):
            self._said = True
            log.warning(
                f"none of {seen.scored} responses has had a reward ({self._reward}). Either the policy solves none of "
                "the problems, or it does not answer in the form that the reward looks for. One of them: "
                f"{seen.first}. Where the form is wrong, ask for it in the data's prompts (of GSM8K: flashrl data "
                "gsm8k-boxed), or set reward.custom_reward_function.path"
            )

    def _refuse(self, why: str) -> None:
        raise RewardError(
            f"the reward ({self._reward}) failed for {self._seen.failed} of {self._seen.scored} responses, {why}. Of "
            f"one of them {self._seen.failure}. Remedy: a reward function that returns a finite number for every "
            "response, such as 0 for what it cannot judge in time; of a data_source that verl does not know, one of "
            "your own (reward.custom_reward_function.path)"
        )
