# SPDX-License-Identifier: Apache-2.0
"""The settings of the guard: the node ``flashrl.guard``, typed and checked. Like ``config.py``, without torch, vLLM or verl."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flashrl_verl.accepted import Accepted, require_accepted, require_bool, require_known
from flashrl_verl.errors import ConfigError

NODE = "flashrl.guard"


class Action(str, Enum):
    """What an event does."""

    WARN = "warn"
    """One warning in the log, and the run goes on."""
    STOP = "stop"
    """A GuardError ends the run; its last checkpoint stays whole."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Limits on how far the sampling policy may be from the trained one, looked at after every step.

    An event is a metric that was beyond its limit for ``patience`` consecutive steps; NaN and infinity are beyond every limit.
    A limit of null turns its metric off. In bypass mode with more than one update a step only the rejected share and the
    code-change rate are watched: the other metrics then compare the rollout with a policy that moves within the step, and a
    large value is no sign of a mismatch. What is watched is logged when the run starts.

    Why ``warn`` is the default: what is wrong for certain stops a run anyway, under any settings (a receipt that differs, NaN
    in an update, a padded vocabulary). These limits are a judgement, made on small models; a false alarm that ends a run on
    many nodes overnight costs more than one that is read in the morning, and without ``trainer.save_freq`` a stop loses all.
    Choose ``stop`` where nobody reads the log and checkpoints are saved.

    Raises:
        ConfigError: A value has the wrong type or is out of range; the message names ``flashrl.guard.<key>``.
    """

    enable: bool = True
    """Whether anything is watched at all."""

    action: Action = Action.WARN
    """What an event does: warn or stop."""

    patience: int = 3
    """Consecutive steps beyond the limit that make an event; at least 1. One batch can be odd, three in a row are a state."""

    k3_kl_max: float | None = 0.02
    """Largest mismatch KL (``rollout_corr/k3_kl``), in nats a token; above 0. A judgement, by small models with planted outlier
    channels alone: those that learned on H200s, or did so until time was over, had steps of up to 1.53e-2; the one that fell
    behind, to which the limit is fitted, had five in a row above this, 4.2e-2 at most (docs/results/learning.md). One with
    larger outliers, on a CPU, had 1.8e-2 to 1.2e-1 in all of 24 steps, fell back and rose again (docs/LOG.md). A report draws a
    line at half of it; that one is to look at, and a step may cross it without an alarm."""

    correlation_min: float | None = 0.9
    """Smallest correlation of the tokens' probabilities, trainer and rollout
    (``training/rollout_actor_probs_pearson_corr``); from -1 to below 1. A policy without any entropy has none (NaN)."""

    eff_sample_size_min: float | None = 0.3
    """Smallest effective sample size of the importance weights (``rollout_corr/rollout_is_eff_sample_size``), as a share of the
    tokens; from 0 to below 1. A judgement: two thirds of the batch then count for nothing. Weights per token as far apart as
    ``k3_kl_max`` allows leave 0.96 (log-normal, cap 2), so what reaches 0.3 is heavy tails, or weights per sequence, whose
    spread grows with the length: at a KL of 2.2 nats a response."""

    truncated_share_max: float | None = 0.2
    """Largest share of weights that the cap C cuts (``rollout_corr/rollout_is_ratio_fraction_high``: of tokens, or of responses
    where weights are per sequence), or of tokens that two bounds drop (``rollout_corr/rollout_is_oob_ratio``); 0 to 1.

    Log-normal ratios with mean 1, as sampling from the rollout's policy gives for tokens and for whole responses, exceed C in
    at most Phi(-sqrt(2 ln C)) of all cases, whatever their spread: 12 % at C = 2, 20 % at C = 1.43, one half at C = 1. Where
    the limit is not above that, the share is not watched, and a warning says so. For two bounds there is no such figure:
    ratios as far apart as ``k3_kl_max`` allows leave 0.5 to 5 in 0.04 % of all cases, but 0.9 to 1.1 in 62 %."""

    rejected_share_max: float | None = 0.5
    """Largest share of tokens that rejection masks (``rollout_corr/rollout_rs_masked_fraction``), 0 to 1. A judgement:
    beyond one half more of the batch is thrown away than learnt from."""

    code_change_rate_min: float | None = 0.0
    """Share of the sampled 8-bit codes that an update has to exceed (``flashrl/code_change_rate``); from 0 to below 1. At 0
    only an update that changes none of them counts: the learning rate is below the quantization step, and the policy that
    samples stands still."""

    def __post_init__(self) -> None:
        require_bool(NODE, self, "enable")
        object.__setattr__(self, "action", _action(self.action))
        require_accepted(NODE, self, _ACCEPTED)

    @classmethod
    def read(cls, value: Any) -> "GuardConfig":
        """Read the node ``flashrl.guard``, as a mapping or already read.

        Raises:
            ConfigError: it is no node, a key is unknown, or a value has the wrong type or range.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping | DictConfig):
            raise ConfigError(f"{NODE}={value!r} is not a node of settings. Set {NODE}.enable=false to turn the guard off.")
        values = OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig) else dict(value)
        require_known(NODE, cls, values, "the guard")
        return cls(**values)


def _action(value: Any) -> Action:
    try:
        return Action(value)
    except ValueError:
        raise ConfigError(
            f"{NODE}.action={value!r} is not an action. Set {NODE}.action to warn or stop, or {NODE}.enable to false."
        ) from None


_NUMBER, _OFF = (int, float), "to turn it off"
_SHARE = Accepted(_NUMBER, lambda v: 0 <= v <= 1, "a share between 0 and 1").or_null(_OFF)
_SHARE_BELOW_1 = Accepted(_NUMBER, lambda v: 0 <= v < 1, "a share from 0 to below 1").or_null(_OFF)
_ACCEPTED = {
    "patience": Accepted((int,), lambda v: v >= 1, "a number of steps, 1 or more"),
    "k3_kl_max": Accepted(_NUMBER, lambda v: v > 0 and math.isfinite(v), "a finite number above 0").or_null(_OFF),
    "correlation_min": Accepted(_NUMBER, lambda v: -1 <= v < 1, "a correlation from -1 to below 1").or_null(_OFF),
    "eff_sample_size_min": _SHARE_BELOW_1,
    "truncated_share_max": _SHARE,
    "rejected_share_max": _SHARE,
    "code_change_rate_min": _SHARE_BELOW_1,
}
