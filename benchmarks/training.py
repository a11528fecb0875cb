# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench training``: how long old log-probs and policy updates of a model take on one GPU, a layer and the
head each.

A layer's seconds are the difference between a model of more layers and one of fewer, the head's what is left; a whole
model is as many layers and a head. Weights are random and BF16, as FSDP2 gathers them; nothing is communicated and no
optimizer steps. What `flashrl plan` takes for a share of the data sheet's operations was measured by it
(docs/results/step.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.plugins.log_probs import log_probs
from flashrl_verl.tools.engines.shapes import load_config, require_host_memory
from flashrl_verl.tools.plan.gpus import of_device
from flashrl_verl.tools.plan.shape import shape_of
from flashrl_verl.tools.plan.whole_step import PASSES, forward_operations


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What to measure."""

    model: str
    layers: tuple[int, int]
    """Of the two models: fewer, more."""
    tokens: int
    """Of one sequence, which is one micro-batch."""
    repeats: int
    device: str
    """``cuda`` or ``cpu``."""
    seed: int = 0

    def __post_init__(self) -> None:
        few, many = self.layers
        if not 1 <= few < many:
            raise ConfigError(f"--layers {few},{many}: two numbers, the second greater than the first")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Log-probs, or a policy update."""

    name: str
    seconds: dict[int, list[float]]
    """Of every repeat, by layers."""
    layer_s: float
    head_s: float
    """Embedding, head and log-softmax."""
    whole_s: float
    """Of the whole model, computed."""
    share: float | None
    """Of the data sheet's BF16 operations that the whole model reaches; None for a device that is not known."""
    share_range: tuple[float, float] | None
    """The same with the seconds of each repeat of one depth beside each of the other: smallest, largest; None too where
    single times are so noisy that a model of more layers is faster than none."""


def measure(config: TrainingConfig, progress: Callable[[str], None] = lambda text: None) -> list[Pass]:
    """Time both passes at both depths.

    Raises:
        ConfigError: the model is not known, or has fewer layers.
        FlashRLError: a model does not fit the GPU, or the times are too noisy to tell a layer from the head.
    """
    if config.device == "cpu":
        require_host_memory(load_config(config.model, config.layers[1]), config.model, copies=2)
    kinds = {"old log-probs": (_log_probs, 1), "policy update": (_update, PASSES)}
    seconds = {name: {} for name in kinds}
    for layers in config.layers:
        progress(f"{config.model} with {layers} layers")
        try:
            model, ids = _model(config, layers), _ids(config)
            for name, (run, _) in kinds.items():
                seconds[name][layers] = [_timed(run, model, ids) for _ in range(1 + config.repeats)][1:]
        except torch.OutOfMemoryError as error:
            raise FlashRLError(
                f"{config.model} with {layers} layers and a sequence of {config.tokens} tokens does not fit the GPU. "
                "Remedy: fewer --layers, or fewer --tokens"
            ) from error
        del model
        if config.device == "cuda":
            torch.cuda.empty_cache()
    return [_pass(config, name, seconds[name], passes) for name, (_, passes) in kinds.items()]


def _pass(config: TrainingConfig, name: str, seconds: dict[int, list[float]], passes: int) -> Pass:
    few, many = config.layers
    medians = {layers: statistics.median(found) for layers, found in seconds.items()}
    layer = (medians[many] - medians[few]) / (many - few)
    head = medians[few] - few * layer
    if min(layer, head) <= 0:
        raise FlashRLError(
            f"{name}: {medians[few]:.4f} s with {few} layers and {medians[many]:.4f} s with {many} leave {layer:.4f} s "
            f"for a layer and {head:.4f} s for the head: too much noise in {seconds}. Remedy: --layers further apart, "
            "more --tokens or --repeats"
        )
    shape = shape_of(load_config(config.model))
    whole = head + shape.layers * layer
    gpu = of_device(torch.cuda.get_device_name()) if config.device == "cuda" else None
    operations = passes * forward_operations(shape, config.tokens, config.tokens)
    share, between = None, None
    if gpu is not None:
        # Of so many layers as the model has: a line through one time at each depth.
        steps = (shape.layers - few) / (many - few)
        wholes = [low + steps * (high - low) for low in seconds[few] for high in seconds[many]]
        share = operations / whole / gpu.bf16
        if min(wholes) > 0:
            between = (operations / max(wholes) / gpu.bf16, operations / min(wholes) / gpu.bf16)
    return Pass(name=name, seconds=seconds, layer_s=layer, head_s=head, whole_s=whole, share=share, share_range=between)


def _model(config: TrainingConfig, layers: int) -> PreTrainedModel:
    torch.manual_seed(config.seed)
    shape = load_config(config.model, layers)
    with torch.device(config.device):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation="sdpa")
    # As in the recipes; without dropout, training mode changes nothing but this.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _ids(config: TrainingConfig) -> torch.Tensor:
    vocabulary = load_config(config.model).vocab_size
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randint(vocabulary, (1, config.tokens), generator=generator).to(config.device)


def _log_probs(model: PreTrainedModel, ids: torch.Tensor) -> None:
    with torch.no_grad():
        log_probs(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])


def _update(model: PreTrainedModel, ids: torch.Tensor) -> None:
    found = log_probs(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])
    (-found.mean()).backward()
    model.zero_grad(set_to_none=True)


def _timed(run: Callable[[PreTrainedModel, torch.Tensor], None], model: PreTrainedModel, ids: torch.Tensor) -> float:
    def wait() -> None:
        if ids.is_cuda:
            torch.cuda.synchronize()

    wait()
    started = time.perf_counter()
    run(model, ids)
    wait()
    return time.perf_counter() - started
