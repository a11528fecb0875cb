# SPDX-License-Identifier: Apache-2.0
"""Which layers a run quantized, recorded in its checkpoints: what is exported or evaluated later is then the same."""

import json
from pathlib import Path
from typing import Any

from flashrl_verl.errors import FlashRLError
from flashrl_verl.settings import FlashRLConfig
from flashrl_verl.trainer.atomic_write import write_whole

FILE = "flashrl.json"
"""In verl's folder of a checkpoint, ``global_step_N``."""

KEYS = ("precision", "rotation", "ignore", "keep_first_layers", "keep_last_layers", "fp32_lm_head", "kv_cache")
"""Settings that decide what the engine computes from given weights."""


def record(settings: FlashRLConfig) -> dict[str, Any]:
    """Return ``KEYS`` of a run as JSON takes them."""
    values = {key: getattr(settings, key) for key in KEYS}
    named = {"precision": settings.precision.value, "kv_cache": settings.kv_cache.value}
    return values | named | {"ignore": list(settings.ignore)}


def save(folder: Path, settings: FlashRLConfig) -> None:
    """Write the record into a checkpoint's folder, which is made; a reader finds the old one or the new one, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, json.dumps(record(settings), indent=1).encode())


def load(folder: Path) -> dict[str, Any] | None:
    """Read the record of a checkpoint; None where it has none (it is older, or no run of this package's).

    Raises:
        FlashRLError: the record is damaged.
    """
    path = folder / FILE
    try:
        found = json.loads(path.read_text())
        return record(FlashRLConfig.from_mapping({key: found[key] for key in KEYS}))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise FlashRLError(
            f"{path} is damaged ({type(error).__name__}: {error}). Remove it, and say --ignore, --keep-first-layers "
            "and --keep-last-layers as the run had them"
        ) from None
