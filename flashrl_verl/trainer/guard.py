# SPDX-License-Identifier: Apache-2.0
"""The guard of a run: limits times patience. After every step it compares metrics with limits, and warns or stops.

A metric beyond its limit for ``flashrl.guard.patience`` consecutive steps is an event, which is told once; again only
when the metric recovered, or was not there, in between. A resumed run counts anew. It is plain Python on the driver:
metrics in, an event out.
"""

import logging
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from flashrl_verl.correction.settings import CorrectionSettings
from flashrl_verl.errors import GuardError
from flashrl_verl.settings import ASYNC, CORRECTION, ROLLOUT, Action, FlashRLConfig, GuardConfig, Precision, get

log = logging.getLogger("verl.flashrl")

NODE = GuardConfig.NODE
LR, THRESHOLD = "actor_rollout_ref.actor.optim.lr", f"{CORRECTION}.rollout_is_threshold"


class Limit(NamedTuple):
    """One metric and its limit."""

    name: str
    """As in the settings."""
    metric: str
    beyond: Callable[[float, float], bool]
    """Of value and limit, both finite. What is not finite is beyond every limit."""
    meaning: str
    remedy: str
    expected: bool = True
    """Whether this configuration is sure to produce the metric: then a missing one is beyond its limit too."""
    after_refit: bool = False
    """Known when the engines hold the update. The others are known before a checkpoint is saved from the step."""

    @property
    def setting(self) -> str:
        """The field of ``GuardConfig`` that holds the limit; null there turns it off."""
        return f"{self.name}_{'max' if self.beyond is operator.gt else 'min'}"


_KEEP = "flashrl.ignore=['re:.*down_proj']"
_CLOSER = {
    Precision.INT8: f"layers kept in BF16 ({_KEEP}), flashrl.precision=bf16 to see what is not quantization's",
    # Three bits of mantissa against seven: docs/results/mismatch.md.
    Precision.FP8: f"flashrl.precision=int8 (a sixth or less of FP8's mismatch), layers kept in BF16 ({_KEEP})",
    Precision.BF16: "the same versions of the model's code in trainer and engine (`flashrl version`)",
}


def limits(
    precision: Precision,
    correction: CorrectionSettings,
    updates: int = 1,
    log_probs: bool = True,
    asynchronous: bool = False,
) -> tuple[Limit, ...]:
    """Everything whose metric tells what its limit is about, in the order in which it is told.

    Args:
        precision: of the rollout.
        correction: which metrics there are, and of what.
        updates: of the actor in a step.
        log_probs: whether the rollout sends its log-probs.
        asynchronous: whether trajectories may be older than the last update. Older ones are far from the policy
            whatever quantization does, so the mismatch is that of trajectories which are not.
    """
    closer = _CLOSER[precision]
    table = []
    # In bypass mode with several updates verl's loss compares pi_theta, which moves with each of them, with pi_rollout:
    # these metrics then tell the size of an update, not the rollout's distance from the trainer. Nor does it tell
    # them by the age of trajectories.
    if not (correction.bypass and (updates > 1 or asynchronous)):
        table += _mismatch(closer)[:1] if asynchronous else _mismatch(closer)
        table += [_weights(closer, correction)] if correction.level else []
    # In bypass mode verl's loss decides what it reports, and there are no log-probs of the trainer's to correlate.
    table = [limit._replace(expected=log_probs and not correction.bypass) for limit in table]
    if asynchronous:  # a batch may have no trajectory of the last update
        table = [
            limit._replace(metric=f"{limit.metric}_lag_0", expected=False) if limit.name == "k3_kl" else limit
            for limit in table
        ]
    table.append(_GRADIENT)
    if precision is not Precision.BF16:
        table.append(_CODES)
    return tuple(table)


def _mismatch(closer: str) -> list[Limit]:
    """How far the sampling policy is from the trained one."""
    remedy = (
        f"{closer}, a lower {LR}; that nothing but the temperature shapes sampling (top_p=1, top_k=-1) and that "
        f"{ROLLOUT}.logprobs_mode=processed_logprobs"
    )
    far = "the policy that samples is far from the one that is trained, more than quantization explains"
    unrelated = (
        "rollout and trainer give the same tokens unrelated probabilities, as with weights of another step (or the "
        "policy has become deterministic: look at actor/entropy)"
    )
    return [
        Limit("k3_kl", "rollout_corr/k3_kl", operator.gt, far, remedy),
        Limit("correlation", "training/rollout_actor_probs_pearson_corr", operator.lt, unrelated, remedy),
    ]


def _weights(closer: str, correction: CorrectionSettings) -> Limit:
    """What the importance weights leave of the batch."""
    remedy = f"{CORRECTION}.rollout_is=token if it is sequence, a lower {LR}, "
    if correction.lower is None:
        few = "a few tokens with large importance weights outweigh the rest, so the gradient is mostly noise"
        remedy += f"a lower {THRESHOLD}"
    else:
        few = "most tokens are dropped, or outweighed by a few, so the gradient is mostly noise"
        remedy += f"a {THRESHOLD} with wider bounds, {closer}"
    return Limit("eff_sample_size", "rollout_corr/rollout_is_eff_sample_size", operator.lt, few, remedy)


_GRADIENT = Limit(
    "grad_norm",
    "actor/grad_norm",
    operator.gt,
    "the gradient of a mini-batch is not finite, and verl leaves such an update out, or it is far beyond any clipping",
    f"a lower {LR}, an earlier checkpoint; NaN in rewards, log-probs or weights says where it comes from",
)
_CODES = Limit(
    "code_change_rate",
    "flashrl/code_change_rate",
    operator.le,
    "updates are smaller than the quantization step, so the policy that samples stands still while the trainer's moves "
    "away",
    f"a higher {LR} (one that is still warming up gets there by itself), algorithm.filter_groups.enable=true (constant "
    "groups have no gradient), or flashrl.precision=bf16",
    after_refit=True,
)


class Guard:
    """Counts, for every limit, the consecutive steps its metric was beyond it.

    Args:
        settings: the node ``flashrl.guard``.
        limits: from ``limits``.
        first_step: the first step at which the actor is updated; before it nothing is watched.
        save_freq: steps between checkpoints; below 1 there are none.
    """

    def __init__(self, settings: GuardConfig, limits: tuple[Limit, ...], first_step: int = 0, save_freq: int = -1):
        self.settings = settings
        self.last_checkpoint: Path | None = None
        """The last whole one of a healthy step: the trainer sets it, an error names it."""
        self._limits = [limit for limit in limits if settings.enable and self._value(limit) is not None]
        self._steps = {limit.name: 0 for limit in self._limits if limit.expected}
        self._events, self._first_step, self._save_freq = 0, first_step, save_freq

    @classmethod
    def from_config(cls, cfg: DictConfig, settings: FlashRLConfig) -> "Guard":
        """The guard of the run that ``cfg``, verl's composed configuration, describes; ``settings`` is its ``flashrl``
        node.

        What is watched is logged, once; that nothing is, as a warning.
        """
        correction = CorrectionSettings.from_config(get(cfg, CORRECTION, {}))
        watched = limits(
            settings.precision,
            correction,
            updates_a_step(cfg),
            bool(get(cfg, f"{ROLLOUT}.calculate_log_probs", False)),
            get(cfg, "trainer.v1.trainer_mode") == ASYNC,
        )
        # During warm-up verl updates the critic only: codes do not change and nothing is corrected.
        guard = cls(settings.guard, watched, get(cfg, "trainer.critic_warmup", 0), get(cfg, "trainer.save_freq", -1))
        if guard._limits:
            names = ", ".join(limit.name for limit in guard._limits)
            log.info("the guard watches %s (%s.*; patience %d)", names, NODE, settings.guard.patience)
        elif settings.guard.enable:
            log.warning(
                "the guard has nothing to watch in this configuration: %s.action and its limits do nothing", NODE
            )
        return guard

    def check(self, step: int, metrics: Mapping[str, Any], *, refitted: bool = False) -> None:
        """Count what is beyond its limit, and act on what has been for the patience.

        Args:
            step: the trainer's global step.
            metrics: verl's and ours.
            refitted: whether the engines hold the step's update; a step is looked at before and after.

        Raises:
            GuardError: an event under ``flashrl.guard.action=stop``.
        """
        if step < self._first_step:
            return
        there = [
            limit
            for limit in self._limits
            if limit.after_refit is refitted and (limit.expected or limit.metric in metrics)
        ]
        for limit in self._limits:  # a step without its metric ends a row
            if limit.after_refit is refitted and limit not in there:
                self._steps.pop(limit.name, None)
        events = [limit for limit in there if self._count(limit, step, metrics) == self.settings.patience]
        self._events += len(events)
        if not events:
            return
        text = self._describe(events, metrics)
        if self.settings.action is Action.WARN:
            log.warning("step %d: the guard: %s. The run goes on; %s.action=stop would end it", step, text, NODE)
            return
        back = f"No checkpoint was saved so far (trainer.save_freq={self._save_freq})"
        if self.last_checkpoint is not None:
            back = f"Resume from {self.last_checkpoint}"
        raise GuardError(
            f"step {step}: the guard stops the run: {text}. {back}, or go on regardless with {NODE}.action=warn"
        )

    @property
    def healthy(self) -> bool:
        """Whether every metric was within its limit when it was last seen."""
        return not any(self._steps.values())

    def metrics(self) -> dict[str, int]:
        """``flashrl/guard_events``, all so far."""
        return {"flashrl/guard_events": self._events} if self.settings.enable else {}

    def _count(self, limit: Limit, step: int, metrics: Mapping[str, Any]) -> int:
        """Take one step's value into account; returns the consecutive steps beyond the limit."""
        value, before = metrics.get(limit.metric), self._steps.get(limit.name, 0)
        beyond = value is None or not math.isfinite(value) or limit.beyond(float(value), self._value(limit))
        self._steps[limit.name] = before + 1 if beyond else 0
        if not beyond and before >= self.settings.patience:
            text = f"{_words(limit, metrics)} is within {self._setting(limit)} again, after {before} steps"
            log.info("step %d: the guard: %s", step, text)
        return self._steps[limit.name]

    def _describe(self, events: list[Limit], metrics: Mapping[str, Any]) -> str:
        """What is beyond its limit and what it means; then what to try, once where two of them have the same remedy."""
        count = "1 step" if self.settings.patience == 1 else f"{self.settings.patience} steps in a row"
        facts = [f"{_words(e, metrics)} is beyond {self._setting(e)} for {count}: {e.meaning}" for e in events]
        remedies = dict.fromkeys(event.remedy for event in events)
        return f"{'; '.join(facts)}. Try {'; or '.join(remedies)}; or another limit (null: off)"

    def _value(self, limit: Limit) -> float | None:
        return getattr(self.settings, limit.setting)

    def _setting(self, limit: Limit) -> str:
        return f"{NODE}.{limit.setting}={self._value(limit):g}"


def _words(limit: Limit, metrics: Mapping[str, Any]) -> str:
    value = metrics.get(limit.metric)
    if value is None:
        return f"{limit.metric}, which is missing although this configuration produces it,"
    return f"{limit.metric}={float(value):.4g}"


def updates_a_step(cfg: DictConfig) -> int:
    """How often verl updates the actor in a step."""
    batch, mini = get(cfg, "data.train_batch_size"), get(cfg, "actor_rollout_ref.actor.ppo_mini_batch_size")
    return get(cfg, "actor_rollout_ref.actor.ppo_epochs", 1) * -(-batch // mini)
