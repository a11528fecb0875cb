# SPDX-License-Identifier: Apache-2.0
"""Which replica of the rollout runs in which precision: ``flashrl.precision``, but the last ones in BF16 if so chosen.

Plain functions: the configuration's check, the replicas that start the engines and the driver that looks at them all
count by these.
"""

import dataclasses
import math
from collections.abc import Sequence

from flashrl_verl.errors import refuse
from flashrl_verl.settings import ROLLOUT, FlashRLConfig, KVCache, Precision

_KEY = "flashrl.bf16_replica_fraction"
_COUNTED = f"trainer.nnodes x trainer.n_gpus_per_node / {ROLLOUT}.tensor_model_parallel_size"


def bf16_replicas(settings: FlashRLConfig, replicas: int) -> int:
    """How many of the replicas run in BF16 beside those of ``flashrl.precision``.

    Args:
        settings: the node ``flashrl``.
        replicas: all of them.

    Raises:
        ConfigError: a mixture is asked for, and so many replicas make none.
    """
    fraction = settings.bf16_replica_fraction
    if fraction == 0:
        return 0
    count = math.floor(fraction * replicas + 0.5)  # not round(), which rounds halves to even numbers
    if not 0 < count < replicas:
        reason = f"of {replicas} replicas ({_COUNTED}) that would be {count} in BF16, so all would be alike"
        fits = f"a smaller {ROLLOUT}.tensor_model_parallel_size"
        if replicas > 1:
            fits = f"{_KEY} from {1 / replicas:g} to {(replicas - 1) / replicas:g}"
        refuse(_KEY, fraction, reason, f"{fits}, or {_KEY}=0.0 (flashrl.precision=bf16 for BF16 alone)")
    return count


def precisions(settings: FlashRLConfig, replicas: int) -> list[Precision]:
    """The precision of every replica, by verl's rank of it; raises like ``bf16_replicas``."""
    count = bf16_replicas(settings, replicas)
    return [settings.precision] * (replicas - count) + [Precision.BF16] * count


def settings_of(settings: FlashRLConfig, replica: int, replicas: int) -> FlashRLConfig:
    """What one replica's engine is started with: formats of its own, and no fraction; raises like ``bf16_replicas``."""
    precision = precisions(settings, replicas)[replica]
    own = {}
    if precision is not settings.precision:
        own = {"rotation": None, "kv_cache": KVCache.AUTO}  # or its mismatch would not be BF16's
    return dataclasses.replace(settings, precision=precision, bf16_replica_fraction=0.0, **own)


def describe(found: Sequence[Precision]) -> str:
    """``int8``, or of a mixture ``int8 (1 of 2 replicas, the other in bf16)``."""
    quantized = [precision.value for precision in found if precision is not Precision.BF16]
    if len(set(found)) == 1:
        return found[0].value
    others = len(found) - len(quantized)
    return f"{quantized[0]} ({len(quantized)} of {len(found)} replicas, the other{'s' * (others > 1)} in bf16)"
