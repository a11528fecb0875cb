# SPDX-License-Identifier: Apache-2.0
"""What `flashrl check` looks for, and how long it waits; the same on every node."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashrl_verl.settings import Precision


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """Settings of a check. They travel to child processes and other nodes as JSON."""

    precisions: tuple[Precision, ...] = (Precision.INT8, Precision.BF16)
    """Precisions whose kernels and numerics are looked at: the default of ``flashrl.precision``, and its baseline."""

    bucket_megabytes: int | None = None
    """Size of the bucket of weights, MiB; None for verl's default of
    ``actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes``."""

    timeout_s: float = 300.0
    """Longest time for a child process, seconds. On two idle cores each takes some 30 s, nearly all of them imports;
    ten times that is a cold disk or a busy machine, and not an endless wait."""

    ship_code: bool = True
    """Whether the nodes of a cluster are sent this package, as ``flashrl.ship_code`` does."""

    shared_memory: str = "/dev/shm"
    """Where POSIX shared memory lies."""

    ray_start_s: float = 120.0
    """How long a node of a cluster may take to answer beyond its own checks, seconds: Ray copies the package there and
    starts a worker, which takes some seconds."""

    def __post_init__(self):
        object.__setattr__(self, "precisions", tuple(Precision(p) for p in self.precisions))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "precisions": [p.value for p in self.precisions]}
