# SPDX-License-Identifier: Apache-2.0
"""Responses that fail: in their generation, or in their reward, which is looked at where it is computed.

verl takes a NaN into the advantages, whose gradient it then skips in every step. A response whose agent loop or reward
raises goes missing from its group, which is filled up with rows of padding; in validation it counts as wrong, or not at
all. Here one whose reward fails counts as one without a reward. How many may fail, in either way, is a setting.

A model that answers in another form than the reward looks for never gets one: every group is constant, dynamic sampling
replaces all of them, and a run would sample to its bound without a word of why. Here a warning shows a response.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from verl.trainer.ppo.reward import resolve_reward_manager_cls

from flashrl_verl.errors import ResponseError

log = logging.getLogger("verl.flashrl")

_SHOWN = 300
"""Characters of the ends of a prompt and of a response."""
_INTERVAL_S = 5.0
"""Between two looks of the driver."""

METRIC = "flashrl/failed_responses"
"""Share of a step's responses that failed, and of validation's those whose reward did."""


class Scored(NamedTuple):
    """A response."""

    value: float
    """Its accuracy, or its reward where there is none: the penalty of length varies without any reward."""
    failure: str
    """Why it has no reward, in words."""
    shown: str
    """Prompt, response and answer for an error message; only of failures and of the first response of an interval."""


def check_rewards(config: DictConfig) -> None:
    """Have verl's reward workers load ``CheckedRewardManager`` around the manager of the configuration, in place."""
    module = {"path": f"pkg://{__name__}", "name": None}
    with open_dict(config):
        config.reward.checked_manager = config.reward.reward_manager
        config.reward.reward_manager = {"source": "importlib", "name": "CheckedRewardManager", "module": module}


class CheckedRewardManager(RewardManagerBase):
    """The manager of the configuration. Where it raises, or returns something other than a finite number, the reward
    is 0, and ``take`` tells."""

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Any, **kwargs: Any):
        super().__init__(config, tokenizer, compute_score)
        own = {"reward": {"reward_manager": config.reward.checked_manager}}
        manager = resolve_reward_manager_cls(OmegaConf.create(own))
        self._manager = manager(config=config, tokenizer=tokenizer, compute_score=compute_score, **kwargs)
        filtered = OmegaConf.select(config, "algorithm.filter_groups") or {}
        self._metric = filtered.get("metric") if filtered.get("enable") else None
        self._scored: list[Scored] = []

    async def run_single(self, data: DataProto) -> dict:
        try:
            result = await self._manager.run_single(data)
            problem = self._problem(result)
        except Exception as error:  # noqa: BLE001 - a user's function raises anything
            log.exception("[flashrl] a reward failed")
            problem = f"it raised {type(error).__name__}: {error}"
        if problem is not None:
            # Without acc: of a function that has none verl would make an accuracy of 0 for every response.
            extra = {self._metric: 0.0} if self._metric not in (None, "reward") else {}
            result = {"reward_score": 0.0, "reward_extra_info": extra}
        result["reward_score"] = float(result["reward_score"])  # with the length penalty verl makes it a tensor
        extra = result.get("reward_extra_info", {})
        extra.pop("reward", None)  # verl's name for the reward itself, and it puts both into one list
        value = float(extra.get("acc", result["reward_score"]))
        shown = ""
        if problem or not self._scored:
            with suppress(Exception):  # a row of another layout has its reward all the same
                shown = self._shown(data[-1])
        self._scored.append(Scored(value, problem or "", shown))
        return result

    def take(self) -> list[Scored]:
        """What there was since the last call."""
        taken, self._scored = self._scored, []
        return taken

    def _problem(self, result: dict) -> str | None:
        values = {"reward": result["reward_score"]}
        extra = result.get("reward_extra_info", {})
        # This one turns what a reward raises into 0. With a score these words are the reward's own.
        if isinstance(self._manager, RateLimitedRewardManager) and "score" not in extra:
            for name in {"timeout", "error"} & extra.keys():
                return f"it ended with {name}={extra[name]}"
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


class RewardWatch:
    """The driver's side.

    Args:
        workers: verl's reward workers.
        reward: the function, for messages.
        limit: ``flashrl.failed_responses_max``, of a step's responses.
        batch: responses, after which at the latest one should have had a reward.

    Raises:
        ResponseError: from every method: more than the limit failed. Of the rewards of the first batch that is said as
            soon as the limit of a whole one failed.
    """

    def __init__(self, workers: Sequence[ray.actor.ActorHandle], reward: str, limit: float, batch: int):
        self._workers, self._reward, self._limit, self._batch = workers, reward, limit, batch
        self._first, self._next = True, time.monotonic() + _INTERVAL_S
        self._scored: list[Scored] = []
        self._asked: list[ray.ObjectRef] = []
        self._said = False
        self._lost, self._due = 0, 0
        self.unrewarded = False
        """Whether no response has had a reward yet, of validation or training."""

    def look(self) -> None:
        """To be called while waiting, however often."""
        if time.monotonic() >= self._next:
            self.ask()
            self._next = time.monotonic() + _INTERVAL_S

    def count_lost(self, groups: Collection[str], failed: Collection[str], keys: Iterable[str], each: int) -> bool:
        """Before verl takes groups, or throws them away: how many of their responses are not there.

        Args:
            groups: which.
            failed: those of which a response has ended with an error.
            keys: of the responses that are there, verl's ``{group}_{response}_{turn}``.
            each: responses of a group.

        Returns:
            Whether any is there.
        """
        there = Counter(group for group, *_ in {tuple(key.split("_")[:2]) for key in keys})
        lost, due = sum(max(0, each - there[group]) for group in set(groups) & set(failed)), each * len(groups)
        self._lost, self._due = self._lost + lost, self._due + due
        return lost < due

    def check_lost(self, nothing: bool = False) -> None:
        """Whether the responses that are not there are more than may be; with ``nothing`` they are."""
        if nothing or self._lost > self._limit * self._due:
            raise ResponseError(
                f"{self._lost} of {self._due} responses ended with an error, more than flashrl.failed_responses_max="
                f"{self._limit:g} allows; the first `Error in _run_prompt` in the log says which. verl would go on "
                "without them: in a synchronous step with rows of padding. Remedy: mend that error"
            )

    def end_validation(self) -> None:
        """When it is there: say whether none of its responses has had a reward."""
        self.check_lost()
        self.ask(whole=True)
        self._lost = self._due = 0
        if self._first:
            self._scored = []

    def end_step(self) -> dict[str, float]:
        """When a batch is there: its metric."""
        self.check_lost()
        self.ask(whole=True)
        self._first = self.unrewarded = False
        failed, count = len(self._failed()), len(self._scored)
        if failed > self._limit * count:
            self._refuse(f"more than flashrl.failed_responses_max={self._limit:g} of a step")
        share = (failed + self._lost) / max(1, count + self._lost)
        self._scored, self._lost, self._due = [], 0, 0
        return {METRIC: share}

    def ask(self, whole: bool = False) -> None:
        """Now, and say whether there is no reward. With ``whole`` wait for all answers, and say so of fewer responses
        than a batch too."""
        if whole or not self._asked:
            self._asked += [worker.__ray_call__.remote(lambda it: it.reward_manager.take()) for worker in self._workers]
        if not whole and len(ray.wait(self._asked, num_returns=len(self._asked), timeout=0)[0]) < len(self._asked):
            return  # a reward that keeps its worker busy keeps the driver from nothing
        asked, self._asked = self._asked, []
        for taken in ray.get(asked):
            self._scored += taken
        if not self._first:
            return
        if len(self._failed()) > self._limit * max(self._batch, len(self._scored)):
            self._refuse(f"more than flashrl.failed_responses_max={self._limit:g} of the first batch")
        values, count = {one.value for one in self._scored if not one.failure}, len(self._scored)
        self.unrewarded = count > 0 and len(values) <= 1 and max(values, default=0.0) <= 0
        if self.unrewarded and not self._said and (whole or count >= self._batch):
            self._said = True
            log.warning(
                f"none of {count} responses has had a reward ({self._reward}). Either the policy solves none of the "
                f"problems, or it does not answer in the form that the reward looks for. One: {self._scored[0].shown}. "
                "Where the form is wrong, ask for it in the data's prompts (of GSM8K: flashrl data gsm8k-boxed), or "
                "set reward.custom_reward_function.path"
            )

    def _failed(self) -> list[Scored]:
        return [one for one in self._scored if one.failure]

    def _refuse(self, why: str) -> NoReturn:
        failed = self._failed()
        raise ResponseError(
            f"the reward ({self._reward}) failed for {len(failed)} of {len(self._scored)} responses, {why}. Of one of "
            f"them {failed[-1].failure}. {failed[-1].shown}. Remedy: a reward function that returns a finite number "
            "for every response, such as 0 for what it cannot judge in time"
        )
