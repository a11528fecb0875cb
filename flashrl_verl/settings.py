# SPDX-License-Identifier: Apache-2.0
"""Every setting of FlashRL: the node ``flashrl`` of the composed configuration, typed and checked.

Each field has its type, default and range in one line, and what it is, with its unit, below. Defaults live here; YAML
files only choose. It needs neither torch nor vLLM nor verl, so that a wrong setting is refused in seconds, on any
machine.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import Any, ClassVar, Self

from omegaconf import DictConfig, OmegaConf

from flashrl_verl.errors import refuse

# ---- keys of verl's configuration that several modules read ----

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path"
DATA = ("data.train_files", "data.val_files")
CORRECTION = "algorithm.rollout_correction"
ASYNC = "flashrl_colocate_async"
"""Of trainer.v1.trainer_mode."""


def get(cfg: DictConfig, key: str, default: Any = None) -> Any:
    """Select a dotted key; absent and null keys give the default, nodes come back as dict or list."""
    value = OmegaConf.select(cfg, key, default=default)
    value = default if value is None else value
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def leaves(node: Any, key: str = "") -> dict[str, Any]:
    """Scalars, lists and empty nodes below a node, a plain dict, by dotted key."""
    if not (isinstance(node, dict) and node):
        return {key: node}
    found = {}
    for name, value in node.items():
        found |= leaves(value, f"{key}.{name}".lstrip("."))
    return found


def has_critic(cfg: DictConfig) -> bool:
    """Whether verl makes one."""
    return bool(get(cfg, "critic.enable", get(cfg, "algorithm.adv_estimator") == "gae"))


def positive_integer(value: Any) -> bool:
    """Whether it counts something that there has to be one of; True is no number here, although Python says so."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# ---- how a field is checked ----

Reader = Callable[[str, Any], Any]
"""Of key and value: the value as the field holds it; refuses any other."""


def _field(default: Any, read: Reader) -> Any:
    return field(default=default, metadata={"read": read})


def _quoted(value: Any) -> Any:
    """A string in quotes, for it may look like the number or switch that it is not."""
    return repr(value) if isinstance(value, str) else value


def _number(
    default: float | None, accepts: Callable[[Any], bool], wanted: str, kinds: type | tuple = (int, float)
) -> Any:
    def read(key: str, value: Any) -> Any:
        # bool is an int in Python; `true` where a number is wanted is a mistake, not a 1.
        if not isinstance(value, kinds) or isinstance(value, bool) or not accepts(value):
            refuse(key, _quoted(value), f"it has to be {wanted}", f"{key}={default:g}, the default")
        return value

    return _field(default, read)


def _count(default: int, least: int, wanted: str) -> Any:
    return _number(default, lambda v: v >= least, wanted, int)


def _limit(default: float, accepts: Callable[[Any], bool], wanted: str) -> Any:
    """A number in a range, or null for none."""
    return _number(
        default, lambda v: v is None or accepts(v), f"{wanted}, or null to turn it off", (int, float, type(None))
    )


def _switch(default: bool) -> Any:
    def read(key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            refuse(key, _quoted(value), "it has to be true or false", f"{key}={str(default).lower()}, the default")
        return value

    return _field(default, read)


def _choice(default: Enum, wanted: str) -> Any:
    def read(key: str, value: Any) -> Enum:
        try:
            return type(default)(value)
        except ValueError:
            near = [one.value for one in type(default) if one.value.startswith(str(value).lower())]
            instead = near[0] if near else f"{default.value}, the default"
            refuse(key, value, f"it has to be {wanted}", f"{key}={instead}")

    return _field(default, read)


def _layers(key: str, value: Any) -> tuple[str, ...]:
    remedy = f"{key}=['re:.*down_proj'], names of layers or 're:' and a regular expression"
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(entry, str) for entry in value):
        refuse(key, value, "it has to be a list of names", remedy)
    for entry in value:
        if entry.endswith(".weight") and not entry.startswith("re:"):
            refuse(key, entry, "this names a tensor, and it takes layers", "leave '.weight' out")
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            refuse(key, entry, f"it is not a regular expression: {error}", remedy)
    return tuple(value)


_CAP = f"{CORRECTION}.rollout_is_threshold"
RENAMED = {
    # verl 0.5, Flash-RL's fork of it, AReaL, TRL, verl 0.6
    **dict.fromkeys(("tis_imp_ratio_cap", "imp_ratio_cap", "behav_imp_weight_cap"), _CAP),
    **dict.fromkeys(("vllm_importance_sampling_cap", "rollout_is_threshold"), _CAP),
    **dict.fromkeys(("vllm_importance_sampling_correction", "rollout_is", "rollout_is_level"), "correction=tis"),
    "rollout_is_mode": "correction=tis or icepop",
    "precision": "flashrl.precision",  # a group of earlier versions
}
"""What other versions and libraries call it -> what to set here."""


class Settings:
    """A node of settings: its fields are checked whenever one is made."""

    NODE: ClassVar[str]
    """Its place in the configuration."""
    REMEDY: ClassVar[str]
    """What to write instead of something that is no node."""

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, f.metadata["read"](f"{self.NODE}.{f.name}", getattr(self, f.name)))

    @classmethod
    def from_mapping(cls, node: Any) -> Self:
        """Read the node, or a copy of it such as ``actor_rollout_ref.rollout.custom.flashrl``.

        Args:
            node: a dict or OmegaConf's; keys that are left out take the default. Settings come back as they are.

        Raises:
            ConfigError: it is no node, a key is unknown, or a value has the wrong type or range.
        """
        if isinstance(node, cls):
            return node
        if not isinstance(node, Mapping | DictConfig):
            refuse(cls.NODE, node, "it has to be a node of settings", cls.REMEDY)
        values = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
        known = [f.name for f in fields(cls)]
        for name, value in values.items():
            key = f"{cls.NODE}.{name}"
            if name not in known:
                refuse(key, value, "there is no such setting", f"remove it, or use one of {', '.join(known)}")
        return cls(**values)


# ---- the settings ----


class Precision(StrEnum):
    """Number format in which the rollout engine holds and multiplies the linear layers."""

    INT8 = "int8"
    """Weights INT8 per output channel, activations INT8 per token (W8A8), accumulated in INT32."""
    FP8 = "fp8"
    """Weights FP8 E4M3 per output channel, activations FP8 per token (W8A8). GPUs since Ada and Hopper."""
    BF16 = "bf16"
    """No quantization: the baseline, on the same server and the same weight update."""


class KVCache(StrEnum):
    """Number format of the rollout engine's KV cache, in vLLM's words (``kv_cache_dtype``)."""

    AUTO = "auto"
    """The model's: BF16, two bytes an element."""
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    """INT8, a scale for each token and head, made as it is written. Our attention (``attention/``), since A100."""


class Action(StrEnum):
    """What an event of the guard does."""

    WARN = "warn"
    """One warning in the log, and the run goes on."""
    STOP = "stop"
    """A GuardError ends the run; its last checkpoint stays whole."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Settings):
    """Limits on how far the sampling policy may be from the trained one, looked at after every step.

    An event is a metric that was beyond its limit for ``patience`` consecutive steps; NaN and infinity are beyond every
    limit. A limit of null turns its metric off. Where the limits come from: docs/precision_and_correction.md.

    Raises:
        ConfigError: A value has the wrong type or is out of range; the message names ``flashrl.guard.<key>``.
    """

    NODE: ClassVar[str] = "flashrl.guard"
    REMEDY: ClassVar[str] = "flashrl.guard.enable=false to turn the guard off"

    enable: bool = _switch(True)
    """Whether anything is watched at all."""

    action: Action = _choice(Action.WARN, "warn or stop (or flashrl.guard.enable=false)")
    """What happens at an event. The default warns, because the limits are heuristics. What is wrong for certain always
    stops the run."""

    patience: int = _count(3, 1, "a number of steps, 1 or more")
    """Consecutive steps beyond the limit that make an event. One batch can be odd, three in a row are a state."""

    k3_kl_max: float | None = _limit(0.02, lambda v: 0 < v < math.inf, "a finite number above 0")
    """Largest mismatch KL (``rollout_corr/k3_kl``), in nats a token: 14 times and more that of rotated INT8 on
    pretrained models of 0.5B and 1.5B, three times SmolLM2's (docs/results/mismatch.md)."""

    correlation_min: float | None = _limit(0.9, lambda v: -1 <= v < 1, "a correlation from -1 to below 1")
    """Smallest correlation of the tokens' probabilities, trainer and rollout
    (``training/rollout_actor_probs_pearson_corr``). Stale weights gave 0.37 and less."""

    eff_sample_size_min: float | None = _limit(0.3, lambda v: 0 <= v < 1, "a share from 0 to below 1")
    """Smallest effective sample size of the importance weights (``rollout_corr/rollout_is_eff_sample_size``), as a
    share of the tokens. Below it two thirds of the batch count for nothing."""

    grad_norm_max: float | None = _limit(1e6, lambda v: 0 < v < math.inf, "a finite number above 0")
    """Largest norm of the actor's gradient before clipping (``actor/grad_norm``): in effect, whether it is finite."""

    code_change_rate_min: float | None = _limit(0.0, lambda v: 0 <= v < 1, "a share from 0 to below 1")
    """Share of the sampled 8-bit codes that an update has to exceed (``flashrl/code_change_rate``). At 0 only an update
    that changes none of them counts: the learning rate is below the quantization step."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Settings):
    """How a step gets its batch, and in which order it learns from it.

    Raises:
        ConfigError: A value has the wrong type or is out of range; the message names ``flashrl.sampling.<key>``.
    """

    NODE: ClassVar[str] = "flashrl.sampling"
    REMEDY: ClassVar[str] = "flashrl.sampling.refill=false for verl's dynamic sampling"

    refill: bool = _switch(True)
    """Whether dynamic sampling starts the groups that it expects to need (``trainer/refill.py``); verl's starts two for
    each constant one. Without effect on asynchronous runs, which always have more groups in flight than a batch, and
    with a sampler of your own."""

    even_mini_batches: bool = _switch(True)
    """Whether each PPO mini-batch is a seeded random draw of the batch, shared evenly among ranks
    (``trainer/mini_batches.py``); verl's run from short to long responses."""


@dataclass(frozen=True, kw_only=True)
class FlashRLConfig(Settings):
    """Settings of the quantized rollout, its weight update, dynamic sampling and the guard.

    Raises:
        ConfigError: A value has the wrong type or is out of range; the message names ``flashrl.<key>``.
    """

    NODE: ClassVar[str] = "flashrl"
    REMEDY: ClassVar[str] = "flashrl.precision=int8, fp8 or bf16; the whole node comes with experiment=base"

    precision: Precision = _choice(
        Precision.INT8, "int8, fp8 (Ada, Hopper and later), or bf16 for a run without quantization"
    )
    """Number format of the rollout engine's linear layers and experts."""

    rotation: bool = _switch(True)
    """Whether inputs and weights of INT8 layers are rotated before they are quantized (``quantization/numerics.py``).
    Other precisions have no rotation."""

    kv_cache: KVCache = _choice(KVCache.AUTO, "auto (BF16) or int8_per_token_head (A100 and later)")
    """Number format of keys and values in the rollout engine."""

    ignore: tuple[str, ...] = _field((), _layers)
    """Layers that stay in high precision: exact names of the checkpoint (without ``.weight``), or ``re:`` and a regular
    expression. An entry that matches no layer is an error."""

    fp32_lm_head: bool = _switch(False)
    """Whether trainer and rollout both compute their logits in FP32 (``fp32_head.py``), at 4 bytes a logit
    in the trainer. A model or setting with which one of them cannot is refused."""

    update_timeout_s: float = _number(60.0, lambda v: 0 < v < math.inf, "a finite number of seconds above 0")
    """Longest silence tolerated from the other side during a weight update, in seconds."""

    max_num_gen_batches: int = _count(10, 0, "an integer of at least 1, or 0 for no bound")
    """Prompts that dynamic sampling may spend on a step, in units of data.train_batch_size; 0 is no bound."""

    failed_responses_max: float = _number(0.01, lambda v: 0 <= v <= 1, "a share between 0 and 1")
    """Largest share of a step's responses that may fail (``trainer/rewards.py``): end with an error, or have a
    reward that raises or is no finite number, which counts as 0."""

    self_check: bool = _switch(True)
    """Whether a run starts by proving on its own engines that an update rewrites all they use
    (``refit/self_check.py``). It takes one more weight update and a few tokens."""

    ship_code: bool = _switch(True)
    """Whether the driver's copy of this package goes to every node with Ray's runtime environment
    (``launch.py``); false where each node has it installed. verl's own entry point never ships it."""

    sampling: SamplingConfig = _field(SamplingConfig(), lambda _, value: SamplingConfig.from_mapping(value))
    """Dynamic sampling and mini-batches; a mapping is read as ``flashrl.sampling``."""

    guard: GuardConfig = _field(GuardConfig(), lambda _, value: GuardConfig.from_mapping(value))
    """What is watched after every step, and what happens beyond a limit; a mapping is read as ``flashrl.guard``."""

    @classmethod
    def of_rollout(cls, rollout: Any) -> Self:
        """Of the copy that verl's workers get: ``custom.flashrl`` of their rollout's configuration."""
        return cls.from_mapping((rollout.get("custom") or {}).get("flashrl", {}))
