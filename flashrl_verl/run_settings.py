# SPDX-License-Identifier: Apache-2.0
"""Which layers a run quantized, recorded in its checkpoints: what is exported or evaluated later is then the same."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashrl_verl.config import FlashRLConfig, KVCache
from flashrl_verl.errors import ConfigError, FlashRLError

FILE = "flashrl.json"
"""In verl's folder of a checkpoint, ``global_step_N``."""

KEYS = ("precision", "ignore", "keep_first_layers", "keep_last_layers", "fp32_lm_head", "kv_cache")
"""Settings that decide what the engine computes from given weights."""

_NOT_IN_OLD_RECORDS = {"kv_cache": KVCache.AUTO.value}
"""What earlier versions did not write down, and their runs nearly all had."""

NOTHING = "none"
"""``--ignore none``: no layer, whatever the run recorded."""


def record(settings: FlashRLConfig) -> dict[str, Any]:
    """Return ``KEYS`` of a run as JSON takes them."""
    values = {key: getattr(settings, key) for key in KEYS}
    named = {"precision": settings.precision.value, "kv_cache": settings.kv_cache.value}
    return values | named | {"ignore": list(settings.ignore)}


def save(folder: Path, settings: FlashRLConfig) -> None:
    """Write the record into a checkpoint's folder, which is made; a reader finds the old one or the new one, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f"{FILE}.tmp"
    with open(scratch, "w") as file:
        json.dump(record(settings), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(folder / FILE)


def load(folder: Path) -> dict[str, Any] | None:
    """Read the record of a checkpoint; None where it has none (it is older, or no run of this package's).

    Raises:
        FlashRLError: the record is damaged.
    """
    path = folder / FILE
    try:
        found = _NOT_IN_OLD_RECORDS | json.loads(path.read_text())
        return record(FlashRLConfig.from_mapping({key: found[key] for key in KEYS}))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise FlashRLError(
            f"{path} is damaged ({type(error).__name__}: {error}). Remove it, and say --ignore, --keep-first-layers and "
            "--keep-last-layers as the run had them"
        ) from None


def layers_of(recorded: Mapping[str, Any] | None, ignore: Sequence[str], first: int | None, last: int | None) -> dict[str, Any]:
    """Which layers stay in high precision: what the command line says, else what the run recorded, else none.

    Args:
        recorded: the checkpoint's record.
        ignore: ``--ignore``; empty when it was not said, ``none`` alone for no layer.
        first: ``--keep-first-layers``, or None.
        last: ``--keep-last-layers``, or None.

    Returns:
        ``ignore``, ``keep_first_layers`` and ``keep_last_layers``, checked.

    Raises:
        ConfigError: a value is not of its kind.
    """
    known = recorded or {}
    if NOTHING in ignore and len(ignore) > 1:
        raise ConfigError(
            f"--ignore {' --ignore '.join(ignore)}: {NOTHING} stands for no layer at all. Leave it out, or the others"
        )
    said = [entry for entry in ignore if entry != NOTHING]
    chosen = {
        "ignore": said if ignore else known.get("ignore", []),
        "keep_first_layers": known.get("keep_first_layers", 0) if first is None else first,
        "keep_last_layers": known.get("keep_last_layers", 0) if last is None else last,
    }
    FlashRLConfig(**chosen)
    return chosen


def kv_cache_of(recorded: Mapping[str, Any] | None) -> KVCache:
    """The KV cache that a run's engine had; BF16 where the record is older, or there is none."""
    return KVCache((recorded or {}).get("kv_cache", KVCache.AUTO))
