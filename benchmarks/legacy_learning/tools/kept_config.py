# SPDX-License-Identifier: Apache-2.0
"""The configuration that a run's directory keeps, and what another differs from it in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrl_verl.errors import words

if TYPE_CHECKING:
    from omegaconf import DictConfig


def load(file: Path) -> dict[str, Any]:
    """A kept configuration, flat: values by dotted key."""
    from omegaconf import OmegaConf

    from benchmarks.legacy_learning.tools.dry_run import leaves

    return leaves(OmegaConf.load(file), resolve=False)


def as_kept(cfg: DictConfig) -> dict[str, Any]:
    """What ``load`` gives of a configuration once it is kept."""
    from omegaconf import OmegaConf

    from benchmarks.legacy_learning.tools.dry_run import leaves

    return leaves(OmegaConf.create(OmegaConf.to_yaml(cfg, resolve=True)), resolve=False)  # the same way through YAML


def different(old: dict[str, Any], new: dict[str, Any], free: tuple[str, ...]) -> list[str]:
    """What differs between two of them: `key=new (was old)`, by key.

    Args:
        old: values by dotted key.
        new: the same.
        free: keys that may differ, with everything below them.
    """
    return [
        f"{key}={words(new.get(key))} (was {words(old.get(key))})"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not any(key == name or key.startswith(f"{name}.") for name in free)
    ]
