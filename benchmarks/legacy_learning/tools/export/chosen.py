# SPDX-License-Identifier: Apache-2.0
"""Which layers stay in high precision: what the command line says over a run's record (``run_settings.py``)."""

from collections.abc import Mapping, Sequence
from typing import Any

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import FlashRLConfig, KVCache

NOTHING = "none"
"""``--ignore none``: no layer, whatever the run recorded."""


def layers_of(
    recorded: Mapping[str, Any] | None, ignore: Sequence[str], first: int | None, last: int | None
) -> dict[str, Any]:
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
