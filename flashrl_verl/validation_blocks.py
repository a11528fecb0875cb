# SPDX-License-Identifier: Apache-2.0
"""Scales by block need a model of whole blocks: asked of its config.json, where that lies here, before a run starts."""

import json
from pathlib import Path

from omegaconf import DictConfig

from flashrl_verl.config import FlashRLConfig
from flashrl_verl.local_paths import MODEL
from flashrl_verl.quantization.rank_layers import require_blocks_of_model
from flashrl_verl.rules import ROLLOUT, get, positive_integer


def check_blocks(cfg: DictConfig, settings: FlashRLConfig) -> None:
    """Refuse what the engine would refuse when it is built. A model of another machine, of the hub, or of a family that is not
    known here is left to the engine.

    Raises:
        ConfigError: a layer is not whole blocks on each rank; the engine's words.
    """
    if settings.precision.block is None:
        return
    try:
        config = json.loads((Path(get(cfg, MODEL, "")) / "config.json").read_text())
    except (OSError, ValueError):  # missing paths and damaged files have messages of their own
        return
    ranks = get(cfg, f"{ROLLOUT}.tensor_model_parallel_size", 1)
    if isinstance(config, dict) and positive_integer(ranks):
        require_blocks_of_model(config, settings, ranks)
