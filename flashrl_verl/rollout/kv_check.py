# SPDX-License-Identifier: Apache-2.0
"""Whether a live engine's KV cache is what its name says: plain data, compared wherever it arrives."""

from typing import Any

from flashrl_verl.config import KVCache
from flashrl_verl.errors import ConfigError, FlashRLError


def require_kv_cache(wanted: KVCache, found: dict[str, Any]) -> None:
    """Refuse a live engine whose KV cache is in another format, or whose scales would not follow the policy.

    Args:
        wanted: what was asked for.
        found: ``kv_cache_state`` of one worker.

    Raises:
        FlashRLError: another format (ConfigError: the model or its attention backend does not suit the one asked for).
    """
    if set(found["dtypes"]) - wanted.engine_names or (wanted is not KVCache.AUTO and not found["dtypes"]):
        held = found["dtypes"] or "none"
        raise FlashRLError(
            f"flashrl.kv_cache={wanted.value}, but the engine's attention layers have a KV cache in {held} "
            f"(with backends {found['backends']}); check `flashrl version`, or set flashrl.kv_cache=auto"
        )
    if found["unfollowed"]:
        name, why = next(iter(found["unfollowed"].items()))
        raise ConfigError(
            f"flashrl.kv_cache={wanted.value}: the scales of {len(found['unfollowed'])} layers could not follow the policy, "
            f"{name} for one: {why}. Set flashrl.kv_cache to auto, fp8_per_token_head or int8_per_token_head"
        )
