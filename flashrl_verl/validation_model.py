# SPDX-License-Identifier: Apache-2.0
"""Scales by block need a model of whole blocks, and our attention heads that it takes: asked of config.json, where the model
lies here, before a run starts."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from flashrl_verl.attention.limits import REMEDY, why_not_model
from flashrl_verl.config import FlashRLConfig, KVCache
from flashrl_verl.errors import ConfigError
from flashrl_verl.local_paths import MODEL
from flashrl_verl.quantization.rank_layers import require_blocks_of_model
from flashrl_verl.rules import ROLLOUT, get, positive_integer


def check_model(cfg: DictConfig, settings: FlashRLConfig) -> None:
    """Refuse what the engine would refuse when it is built. A model of another machine, of the hub, or of a family that is not
    known here is left to the engine.

    Raises:
        ConfigError: a layer is not whole blocks on each rank (the engine's words), or our attention does not take its heads.
    """
    blocks, int8_kv = settings.precision.block is not None, settings.kv_cache is KVCache.INT8_PER_TOKEN_HEAD
    config = _config(cfg) if blocks or int8_kv else None
    if config is None:
        return
    ranks = get(cfg, f"{ROLLOUT}.tensor_model_parallel_size", 1)
    if blocks and positive_integer(ranks):
        require_blocks_of_model(config, settings, ranks)
    if int8_kv and not _other_attention(cfg) and (reason := why_not_model(config)) is not None:
        kv_cache, model = settings.kv_cache.value, get(cfg, MODEL)
        raise ConfigError(f"flashrl.kv_cache={kv_cache}: its attention does not take {model}, which has {reason}. {REMEDY}")


def _other_attention(cfg: DictConfig) -> bool:
    engine = f"{ROLLOUT}.engine_kwargs.vllm"
    return any(get(cfg, f"{engine}.{key}", None) for key in ("attention_backend", "attention_config.backend"))


def _config(cfg: DictConfig) -> dict[str, Any] | None:
    try:
        config = json.loads((Path(get(cfg, MODEL, "")) / "config.json").read_text())
    except (OSError, ValueError):  # missing paths and damaged files have messages of their own
        return None
    return config if isinstance(config, dict) else None
