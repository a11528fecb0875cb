# SPDX-License-Identifier: Apache-2.0
"""The model of ``flashrl bench mismatch``: a checkpoint in high precision, or the toy, made and warmed up here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.config import FlashRLConfig
from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.rank_layers import require_blocks_of_model

if TYPE_CHECKING:
    from flashrl_verl.bench.arms import Arm
    from flashrl_verl.bench.mismatch import MismatchConfig
    from flashrl_verl.bench.mismatch_prompts import Prompts
    from flashrl_verl.toy.model import ToyModelConfig

TOY = "toy"
"""Value of ``--model`` for the quickstart's model, made and warmed up on the spot."""


def toy_config(config: MismatchConfig) -> ToyModelConfig:
    """All arms have the same toy."""
    from flashrl_verl.toy.model import toy_for

    return toy_for(*(arm.precision for arm in config.arms))


def model_name(config: MismatchConfig) -> str:
    """As a report names it."""
    if config.model != TOY:
        return config.model
    return f"{TOY} with {toy_config(config).num_kv_heads} KV heads, for whole blocks" if _block_arms(config) else TOY


def checkpoint(config: MismatchConfig, progress: Callable[[str], None]) -> Path:
    """The checkpoint's folder; makes the toy model.

    Args:
        config: which, and for which arms.
        progress: called with a line.

    Raises:
        ConfigError: there is none, or not in high precision, or not of whole blocks where an arm has scales by block.
    """
    if config.model == TOY:
        return _make_toy(config, progress)
    folder = Path(config.model).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {config.model} is neither {TOY!r} nor a folder with a config.json")
    settings = json.loads((folder / "config.json").read_text())
    if "quantization_config" in settings:
        raise ConfigError(f"--model {config.model} is a quantized checkpoint; the trainer needs the high-precision one")
    if not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        raise ConfigError(f"--model {config.model} holds no weights (*.safetensors)")
    for arm in _block_arms(config):
        try:
            require_blocks_of_model(settings, FlashRLConfig(precision=arm.precision), 1)
        except ConfigError as error:
            raise ConfigError(f"--precision {arm}: {error}") from error
    return folder


def require_room(model: Path, prompts: Prompts, tokens: int) -> None:
    """Refuse responses for which the model has no positions.

    Raises:
        ConfigError: with the longest prompt they reach its limit.
    """
    from transformers import AutoConfig

    longest = max(map(len, prompts.tokens))
    limit = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest + tokens >= limit:  # one token more is asked for when responses are scored
        raise ConfigError(
            f"--tokens {tokens}: with the longest prompt's {longest} tokens that reaches the model's limit of {limit}; set "
            f"--tokens below {limit - longest}"
        )


def _block_arms(config: MismatchConfig) -> list[Arm]:
    return [arm for arm in config.arms if arm.precision.block is not None]


def _make_toy(config: MismatchConfig, progress: Callable[[str], None]) -> Path:
    from flashrl_verl.toy.assets import AssetsConfig, make_assets

    progress("toy model: supervised warm-up")
    assets = make_assets(
        config.output / "assets",
        AssetsConfig(seed=config.seed, model=toy_config(config)),
        on_probe=lambda step, a: progress(f"toy model: supervised warm-up, update {step}, accuracy {a.sampled:.2f}"),
    )
    return assets.model.resolve()
