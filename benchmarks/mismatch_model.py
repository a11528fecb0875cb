# SPDX-License-Identifier: Apache-2.0
"""The model of ``flashrl bench mismatch``: a checkpoint in high precision, or the toy, made and warmed up here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flashrl_verl.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.mismatch import MismatchConfig
    from benchmarks.mismatch_prompts import Prompts

TOY = "toy"
"""Value of ``--model`` for the quickstart's model, made and warmed up on the spot."""


def checkpoint(config: MismatchConfig, progress: Callable[[str], None]) -> Path:
    """The checkpoint's folder; makes the toy model.

    Args:
        config: which.
        progress: called with a line.

    Raises:
        ConfigError: there is none, or not in high precision.
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
            f"--tokens {tokens}: with the longest prompt's {longest} tokens that reaches the model's limit of {limit}; "
            f"set --tokens below {limit - longest}"
        )


def _make_toy(config: MismatchConfig, progress: Callable[[str], None]) -> Path:
    from flashrl_verl.quickstart.assets import AssetsConfig, make_assets

    progress("toy model: supervised warm-up")
    assets = make_assets(
        config.output / "assets",
        AssetsConfig(seed=config.seed),
        on_probe=lambda step, a: progress(f"toy model: supervised warm-up, update {step}, accuracy {a.sampled:.2f}"),
    )
    return assets.model.resolve()
