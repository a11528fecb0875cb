# SPDX-License-Identifier: Apache-2.0
"""The settings of FlashRL: the node ``flashrl`` of the composed configuration, typed and checked.

It needs neither torch nor vLLM nor verl, so that a wrong setting is refused in seconds, on any machine.
Defaults live here; YAML files only choose.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flashrl_verl.accepted import Accepted, require_accepted, require_bool, require_known
from flashrl_verl.errors import ConfigError
from flashrl_verl.guard_settings import GuardConfig


class Precision(str, Enum):
    """Number format in which the rollout engine holds and multiplies the linear layers."""

    INT8 = "int8"
    """Weights INT8 per output channel, activations INT8 per token (W8A8), accumulated in INT32."""
    FP8 = "fp8"
    """Weights FP8 E4M3 per output channel, activations FP8 per token (W8A8). GPUs since Ada and Hopper."""
    FP8_BLOCK = "fp8_block"
    """Weights FP8 E4M3 per 128 x 128 block, activations FP8 per token and 128 columns (W8A8), as DeepSeek-V3 and verl's own FP8
    rollout have them. The same GPUs; every rank's part of a layer has to be whole blocks."""
    BF16 = "bf16"
    """No quantization: the baseline, on the same server and the same weight update."""

    @property
    def block(self) -> int | None:
        """Rows and columns of a weight that share a scale, and columns of a token; None where each row has one, or none has."""
        return 128 if self is Precision.FP8_BLOCK else None


class KVCache(str, Enum):
    """Number format of the rollout engine's KV cache, in vLLM's words (``kv_cache_dtype``)."""

    AUTO = "auto"
    """The model's: BF16, two bytes an element."""
    FP8 = "fp8"
    """E4M3, one byte; one scale a layer each for queries, keys and values, a bound that every update derives from the weights
    (``rollout/kv_scales.py``). FlashAttention 3 (Hopper), or vLLM's Triton attention since Ada."""
    FP8_PER_TOKEN_HEAD = "fp8_per_token_head"
    """E4M3, a scale for each token and head, made as it is written. vLLM's Triton attention, since Ada."""
    INT8_PER_TOKEN_HEAD = "int8_per_token_head"
    """INT8, scaled alike. Our attention (``attention/``), on A100 too."""

    @property
    def engine_names(self) -> frozenset[str]:
        """What vLLM's attention layers call it."""
        return _ENGINE_NAMES.get(self, frozenset({self.value}))


_ENGINE_NAMES = {
    KVCache.AUTO: frozenset({"auto", "bfloat16", "float16"}),
    KVCache.FP8: frozenset({"fp8", "fp8_e4m3"}),
}


class ServerAddress(str, Enum):
    """Where the HTTP server of a rollout engine listens. Whoever asks it needs its key, wherever it listens."""

    LOOPBACK = "loopback"
    """An address that only programs on the same machine reach."""
    NODE = "node"
    """The node's address in the Ray cluster, for programs on other nodes: an agent framework, a monitor."""


@dataclass(frozen=True, kw_only=True)
class FlashRLConfig:
    """Settings of the quantized rollout, its weight update, dynamic sampling and the guard.

    Raises:
        ConfigError: A value has the wrong type or is out of range; the message names ``flashrl.<key>``.
    """

    precision: Precision = Precision.INT8
    """Number format of the rollout engine's linear layers and experts: int8, fp8, fp8_block or bf16."""

    bf16_replica_fraction: float = 0.0
    """Share of the rollout's replicas that run in BF16 beside those of ``precision``; from 0 to below 1. Of R replicas the last
    floor(share x R + 1/2) do, at least 1 and at most R - 1.

    It is FlashRL's hybrid rollout (there: a second profile, ``bf16``, in its configuration file, taken in turns by the data
    parallel workers). Two reasons: the tokens that BF16 replicas generate have BF16's mismatch, so that the batch's mean
    falls in proportion to their share of all tokens, at part of the speed (that is not the share of replicas: verl's balancer
    sends more to the faster ones, and ``flashrl/replica_<i>_generated_tokens`` tells); and one run shows both precisions on
    the same weights and prompts, with the tokens that each replica generated and the bytes it holds. Mismatch and correction
    are the whole batch's: a response does not tell which replica sampled it."""

    kv_cache: KVCache = KVCache.AUTO
    """Number format of keys and values in the rollout engine: auto (BF16), fp8, fp8_per_token_head or int8_per_token_head.
    Replicas in BF16 (``bf16_replica_fraction``) keep theirs in BF16."""

    ignore: tuple[str, ...] = ()
    """Layers that stay in high precision: exact names of the checkpoint (without ``.weight``), or ``re:`` and a regular
    expression. An entry that matches no layer is an error."""

    keep_first_layers: int = 0
    """Decoder layers at the start of the model that stay in high precision; at least 0."""

    keep_last_layers: int = 0
    """Decoder layers at the end of the model that stay in high precision; at least 0."""

    fp32_lm_head: bool = False
    """Whether trainer and rollout both compute their logits in FP32 (``lm_head.py``); a model or setting with which one of them
    cannot is refused."""

    update_timeout_s: float = 60.0
    """Longest silence tolerated from the other side during a weight update, in seconds; above 0."""

    receipt_tensors: int = 64
    """Tensors per update whose checksum is compared, trainer against engine; at least 16 (fewer could miss a
    whole update), or -1 for all."""

    max_num_gen_batches: int = 10
    """Prompts that dynamic sampling may spend on a step, in units of data.train_batch_size; 0 is no bound."""

    self_check: bool = True
    """Whether a run starts by proving on its own engines that an update rewrites all they use (``self_check.py``): one more
    weight update and a few tokens."""

    ship_code: bool = True
    """Whether the driver's copy of this package goes to every node with Ray's runtime environment (``runtime_env.py``); false
    where each node has it installed. verl's own entry point never ships it."""

    padded_vocab_mass_limit: float = 1e-3
    """Probability mass on token ids past the tokenizer's last above which a run is refused; from 0 to 1."""

    server_address: ServerAddress = ServerAddress.LOOPBACK
    """Where the engines' HTTP servers listen: loopback or node. The trainer never uses them, it asks its engines through Ray.
    Every request needs the server's key (``rollout/access.py``)."""

    guard: GuardConfig = GuardConfig()
    """What is watched after every step, and what happens beyond a limit; a mapping is read as ``flashrl.guard``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", _precision(self.precision))
        object.__setattr__(self, "kv_cache", _kv_cache(self.kv_cache))
        object.__setattr__(self, "server_address", _server_address(self.server_address))
        object.__setattr__(self, "ignore", _ignore(self.ignore))
        object.__setattr__(self, "guard", GuardConfig.read(self.guard))
        for name in ("self_check", "fp32_lm_head", "ship_code"):
            require_bool("flashrl", self, name)
        require_accepted("flashrl", self, _ACCEPTED)
        if self.bf16_replica_fraction and self.precision is Precision.BF16:
            raise ConfigError(
                f"flashrl.bf16_replica_fraction={self.bf16_replica_fraction:g} has no effect with flashrl.precision=bf16: all "
                "replicas are in BF16. Set flashrl.precision to int8, fp8 or fp8_block, or flashrl.bf16_replica_fraction to 0."
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "FlashRLConfig":
        """Read the ``flashrl`` node, or its copy under ``actor_rollout_ref.rollout.custom.flashrl``.

        Args:
            mapping: A plain dict or an OmegaConf node; keys that are left out take the default.

        Returns:
            The checked settings.

        Raises:
            ConfigError: A key is unknown, or a value has the wrong type or range.
        """
        if not isinstance(mapping, Mapping | DictConfig):
            raise ConfigError(
                f"flashrl={mapping!r} is not a node of settings. Set flashrl.precision to int8, fp8, fp8_block or bf16, "
                "or add the whole node with experiment=base."
            )
        values = OmegaConf.to_container(mapping, resolve=True) if isinstance(mapping, DictConfig) else dict(mapping)
        require_known("flashrl", cls, values, "FlashRL")
        return cls(**values)


_ACCEPTED = {
    "bf16_replica_fraction": Accepted(
        (int, float), lambda v: 0 <= v < 1, "a share from 0 to below 1 (flashrl.precision=bf16 runs all replicas in BF16)"
    ),
    "keep_first_layers": Accepted((int,), lambda v: v >= 0, "a number of layers, 0 or more"),
    "keep_last_layers": Accepted((int,), lambda v: v >= 0, "a number of layers, 0 or more"),
    "update_timeout_s": Accepted((int, float), lambda v: v > 0 and math.isfinite(v), "a finite number of seconds above 0"),
    "receipt_tensors": Accepted((int,), lambda v: v == -1 or v >= 16, "an integer of at least 16, or -1 for all tensors"),
    "max_num_gen_batches": Accepted((int,), lambda v: v >= 0, "an integer of at least 1, or 0 for no bound"),
    "padded_vocab_mass_limit": Accepted((int, float), lambda v: 0 <= v <= 1, "a probability between 0 and 1"),
}


def _precision(value: Any) -> Precision:
    try:
        return Precision(value)
    except ValueError:
        raise ConfigError(
            f"flashrl.precision={value!r} is not a precision of the rollout. Set flashrl.precision to int8, to fp8 or "
            "fp8_block (Ada, Hopper and later), or to bf16 for a run without quantization."
        ) from None


def _kv_cache(value: Any) -> KVCache:
    try:
        return KVCache(value)
    except ValueError:
        raise ConfigError(
            f"flashrl.kv_cache={value!r} is not a format of the KV cache. Set flashrl.kv_cache to auto (BF16), to fp8 (Ada, "
            "Hopper and later), or to int8_per_token_head (A100 and later) or fp8_per_token_head (Ada and later)."
        ) from None


def _server_address(value: Any) -> ServerAddress:
    try:
        return ServerAddress(value)
    except ValueError:
        raise ConfigError(
            f"flashrl.server_address={value!r} is not a place to listen at. Set flashrl.server_address to loopback (this "
            "machine only) or to node (the node's address in the Ray cluster)."
        ) from None


def _ignore(value: Any) -> tuple[str, ...]:
    remedy = "Set flashrl.ignore to a list of layer names or 're:' patterns, such as flashrl.ignore=['re:.*down_proj']."
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(entry, str) for entry in value):
        raise ConfigError(f"flashrl.ignore={value!r} is not a list of names. {remedy}")
    for entry in value:
        if entry.endswith(".weight") and not entry.startswith("re:"):
            raise ConfigError(f"flashrl.ignore names a tensor, {entry!r}; it takes layers. Leave '.weight' out.")
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(f"flashrl.ignore={entry!r} is not a regular expression: {error}. {remedy}") from None
    return tuple(value)
