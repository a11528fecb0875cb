# SPDX-License-Identifier: Apache-2.0
"""Models whose logits BF16 rounds by much, and a sleeping engine of one, for a process of its own."""

from pathlib import Path

import torch
from engines import Refit, engine, greedy
from tiny_models import make, wire
from transformers import PreTrainedModel


def model_with_large_logits(name: str, tied: bool, seed: int) -> PreTrainedModel:
    """Every row of the head has a vector in common, so that logits of one token are large and close together: soft-max
    does not see what they share, BF16 rounds by it."""
    model = make(name, seed, tie_word_embeddings=tied)
    with torch.no_grad():
        common = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(seed + 50))
        model.get_output_embeddings().weight.add_(3 * common)
    return model


def save(model: PreTrainedModel, path) -> None:
    path.mkdir()
    model.config.save_pretrained(path)


def sleep_and_wake(folder: Path, tied: bool) -> tuple:
    """What an engine samples before it sleeps, and after it got the same weights again."""
    trainer = model_with_large_logits("qwen2.5", tied, seed=0)
    save(trainer, folder / "model")
    settings = {"precision": "int8", "fp32_lm_head": True}
    with engine(folder / "model", settings, compiled=True, enable_sleep_mode=True) as llm:
        (layers,) = llm.collective_rpc("flashrl_layers")
        refit = Refit(llm)
        refit(wire(trainer), 0)
        before = greedy(llm)
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        refit(wire(trainer), 1)
        llm.wake_up(tags=["kv_cache"])
        return layers["head_dtype"], before, greedy(llm)
