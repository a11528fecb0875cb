# SPDX-License-Identifier: Apache-2.0
"""What the guard watches: a metric of verl's or ours, its limit, and what to tell a user who meets it."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from statistics import NormalDist

from omegaconf import DictConfig

from flashrl_verl.config import FlashRLConfig, Precision
from flashrl_verl.correction_settings import CorrectionSettings
from flashrl_verl.rules import CORRECTION, ROLLOUT, get

LR = "actor_rollout_ref.actor.optim.lr"


class Moment(Enum):
    """When in a step the metric is known."""

    TRAINED = "trained"
    """The step's samples were trained on; no checkpoint was saved from it yet."""
    REFITTED = "refitted"
    """The update is in the rollout engines."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """One metric and its limit."""

    name: str
    """As in ``flashrl/guard_<name>_steps``."""
    metric: str
    limit: str
    """The field of ``GuardConfig`` that holds it."""
    beyond: Callable[[float, float], bool]
    """Of value and limit, both finite."""
    moment: Moment
    meaning: str
    remedy: str
    ordinary: float | None = None
    """Value that the metric may reach with ratios of an ordinary shape, however far apart they are: a limit that is not beyond
    it says nothing."""


def watches(precision: Precision, correction: CorrectionSettings, updates: int = 1) -> tuple[Watch, ...]:
    """Everything whose metric tells what its limit is about.

    Args:
        precision: decides what to try against a large mismatch.
        correction: which metrics there are, and of what.
        updates: of the actor in a step.
    """
    apart = (*_mismatch(precision), *(_weights(precision, correction) if correction.level else ()))
    # In bypass mode verl's loss compares pi_theta, which moves with every update, with pi_rollout: after the first one mismatch
    # KL, weights and their sample size tell the size of an update, not the rollout's distance from the trainer.
    if correction.bypass and updates > 1:
        apart = ()
    return (*apart, _rejection(precision), _CODES)


def _mismatch(precision: Precision) -> tuple[Watch, ...]:
    """How far the sampling policy is from the trained one."""
    remedy = (
        f"{_CLOSER[precision]}, a lower {LR}; that nothing but the temperature shapes sampling (top_p=1, top_k=-1) and that "
        f"{ROLLOUT}.logprobs_mode=processed_logprobs"
    )
    return (
        Watch(
            name="k3_kl",
            metric="rollout_corr/k3_kl",
            limit="k3_kl_max",
            beyond=operator.gt,
            moment=Moment.TRAINED,
            meaning="the policy that samples is far from the one that is trained, more than quantization explains",
            remedy=remedy,
        ),
        Watch(
            name="correlation",
            metric="training/rollout_actor_probs_pearson_corr",
            limit="correlation_min",
            beyond=operator.lt,
            moment=Moment.TRAINED,
            meaning=(
                "rollout and trainer give the same tokens unrelated probabilities, as with weights of another step (or the "
                "policy has become deterministic: look at actor/entropy)"
            ),
            remedy=remedy,
        ),
    )


def _weights(precision: Precision, correction: CorrectionSettings) -> tuple[Watch, ...]:
    """What the importance weights leave of the batch: a cap cuts them, two bounds drop tokens."""
    per_token, threshold = f"{CORRECTION}.rollout_is=token if it is sequence", f"{CORRECTION}.rollout_is_threshold"
    sample_size = Watch(
        name="eff_sample_size",
        metric="rollout_corr/rollout_is_eff_sample_size",
        limit="eff_sample_size_min",
        beyond=operator.lt,
        moment=Moment.TRAINED,
        meaning="a few tokens with large importance weights outweigh the rest, so the gradient is mostly noise",
        remedy=f"{per_token}, a lower {threshold}, a lower {LR}",
    )
    truncated = Watch(
        name="truncated_share",
        metric="rollout_corr/rollout_is_ratio_fraction_high",
        limit="truncated_share_max",
        beyond=operator.gt,
        moment=Moment.TRAINED,
        meaning="so many importance weights are cut at the cap that the gradient stays biased",
        remedy=f"a higher {threshold}, {_CLOSER[precision]}, a lower {LR}",
    )
    if correction.lower is None:
        return sample_size, replace(truncated, ordinary=largest_truncated_share(correction.upper))
    wider = f"{per_token}, a {threshold} with wider bounds, {_CLOSER[precision]}, a lower {LR}"
    few = "most tokens are dropped, or outweighed by a few, so the gradient is mostly noise"
    return (
        replace(sample_size, meaning=few, remedy=wider),
        replace(
            truncated,
            # Outside on either side; the fraction above leaves out those below the lower bound.
            metric="rollout_corr/rollout_is_oob_ratio",
            meaning="so many tokens are dropped, their ratios being outside the bounds, that the gradient is of the others",
            remedy=wider,
        ),
    )


def largest_truncated_share(cap: float) -> float:
    """Of log-normal ratios with mean 1, the largest share above ``cap`` (>= 1) under any spread: Phi(-sqrt(2 ln C)).

    With log r ~ N(-s^2/2, s^2) the share is Phi(-(ln C + s^2/2) / s), largest at s^2 = 2 ln C. A mixture has no more.
    """
    return NormalDist().cdf(-math.sqrt(2 * math.log(cap)))


def _rejection(precision: Precision) -> Watch:
    return Watch(
        name="rejected_share",
        metric="rollout_corr/rollout_rs_masked_fraction",
        limit="rejected_share_max",
        beyond=operator.gt,
        moment=Moment.TRAINED,
        meaning="rejection leaves little of the batch to train on",
        remedy=f"a wider {CORRECTION}.rollout_rs_threshold, {_CLOSER[precision]}, a lower {LR}",
    )


_CODES = Watch(
    name="code_change_rate",
    metric="flashrl/code_change_rate",
    limit="code_change_rate_min",
    beyond=operator.le,
    moment=Moment.REFITTED,
    meaning=(
        "updates are smaller than the quantization step, so the policy that samples stands still while the trainer's moves "
        "away from it"
    ),
    remedy=(
        f"a higher {LR} (one that is still warming up gets there by itself), algorithm.filter_groups.enable=true (constant "
        "groups have no gradient), or flashrl.precision=bf16"
    ),
)

_KEEP = "flashrl.ignore=['re:.*down_proj'], flashrl.keep_first_layers, flashrl.keep_last_layers"
_CLOSER = {
    Precision.INT8: f"layers kept in BF16 ({_KEEP}), flashrl.precision=bf16 to see what is not quantization's",
    # Three bits of mantissa against seven: docs/results/mismatch.md.
    Precision.FP8: f"flashrl.precision=int8 (a tenth of FP8's mismatch), layers kept in BF16 ({_KEEP})",
    Precision.FP8_BLOCK: f"flashrl.precision=int8 (seven bits of mantissa for three), layers kept in BF16 ({_KEEP})",
    Precision.BF16: "the same versions of the model's code in trainer and engine (`flashrl version`)",
}


def produced(cfg: DictConfig, settings: FlashRLConfig, correction: CorrectionSettings) -> frozenset[str]:
    """Names of the watches whose metric this configuration is sure to produce: there, a missing one is no accident.

    Args:
        cfg: verl's composed configuration.
        settings: its ``flashrl`` node.
        correction: its ``algorithm.rollout_correction`` node.
    """
    names = set()
    if settings.precision is not Precision.BF16:
        names.add("code_change_rate")
    # verl's bypass takes the rollout's log-probs for the trainer's: there is nothing to correlate, and its loss decides what
    # it reports.
    if get(cfg, f"{ROLLOUT}.calculate_log_probs", False) and not correction.bypass:
        names |= {"k3_kl", "correlation"}
        if correction.level is not None:
            names |= {"eff_sample_size", "truncated_share"}
        if correction.rejections:
            names.add("rejected_share")
    return frozenset(names)
