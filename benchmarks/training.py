# SPDX-License-Identifier: Apache-2.0
"""How long old log-probs and policy updates of a model take on one GPU, a layer and the head each.

    python -m benchmarks.training --model qwen2.5-32b --layers 2,6

A layer's seconds are the difference between a model of more layers and one of fewer, the head's what is left; a whole
model is as many layers and a head. Random BF16 weights, as FSDP2 gathers them; nothing is communicated and no optimizer
steps. `flashrl plan` takes its share of the data sheet's operations from it (docs/results/step.md).
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import environment, run, show, write_json
from benchmarks.refit import device_here, timed
from flashrl_verl.errors import ConfigError, FlashRLError

PASSES = {"old log-probs": 1, "policy update": 4}
"""How many forward passes' operations each takes: an update is forward, recomputation and a backward pass of two."""
BF16_OPERATIONS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""A second, dense, by the data sheets of cards whose names contain this."""


def forward_operations(config: Any, tokens: int) -> float:
    """Of a forward pass over one sequence: products with every weight but the embedding, and causal attention."""
    from flashrl_verl.tools.engines.shapes import tensor_shapes

    matrices = sum(t.numel() for name, t in tensor_shapes(config) if t.dim() > 1 and "embed_tokens" not in name)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * head * tokens**2
    return 2 * matrices * tokens + attention


def time_passes(config: Any, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of both passes of a model, after one of each that is not counted."""
    from transformers import AutoModelForCausalLM

    from flashrl_verl.plugins.log_probs import log_probs

    torch.manual_seed(0)
    with device_here():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
        ids = torch.randint(config.vocab_size, (1, tokens))
    model.gradient_checkpointing_enable({"use_reentrant": False})  # as in the recipes

    def forward() -> torch.Tensor:
        return log_probs(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])

    def update() -> None:
        (-forward().mean()).backward()
        model.zero_grad(set_to_none=True)

    work = dict(zip(PASSES, (torch.no_grad()(forward), update), strict=True))
    return {name: [timed(one) for _ in range(1 + repeats)][1:] for name, one in work.items()}


def by_part(name: str, seconds: dict[int, list[float]], layers: int) -> dict[str, Any]:
    """A layer, the head, and a whole model of so many layers.

    Raises:
        FlashRLError: the times are too noisy to tell a layer from the head.
    """
    (few, low), (many, high) = ((depth, statistics.median(found)) for depth, found in sorted(seconds.items()))
    layer = (high - low) / (many - few)
    head = low - few * layer
    if min(layer, head) <= 0:
        raise FlashRLError(
            f"{name}: {low:.4f} s with {few} layers and {high:.4f} s with {many} are too noisy to tell a layer from "
            "the head. Remedy: --layers further apart, more --tokens or --repeats"
        )
    whole = head + layers * layer
    return {"name": name, "seconds": seconds, "layer_s": layer, "head_s": head, "whole_s": whole}


def training(
    model: Annotated[str, typer.Option(help="A name (qwen2.5-32b, ...), a config.json, or its folder.")] = "tiny",
    layers: Annotated[str, typer.Option(help="Depths of the two models that are timed.")] = "1,2",
    tokens: Annotated[int, typer.Option(min=2, help="Of one sequence, which is one micro-batch.")] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="After one that is not measured.")] = 5,
    output: Annotated[Path, typer.Option(help="Folder for training.json.")] = Path("outputs/training"),
) -> None:
    """Time old log-probs and policy updates of a model's shape on one GPU, or on the CPU."""
    from flashrl_verl.tools.engines.shapes import load_config

    depths = [int(word) if word.strip().isdecimal() else 0 for word in layers.split(",")]
    if len(depths) != 2 or not 0 < depths[0] < depths[1]:
        raise ConfigError(f"--layers {layers!r} is not two numbers, the second greater, such as 2,6")
    whole = load_config(model)
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name in PASSES}
    for depth in depths:
        print(f"{model} with {depth} layers", flush=True)
        try:
            found = time_passes(load_config(model, depth), tokens, repeats)
        except torch.OutOfMemoryError as error:
            raise FlashRLError(
                f"{model} with {depth} layers and {tokens} tokens does not fit the GPU: fewer --layers or --tokens"
            ) from error
        torch.cuda.empty_cache()
        for name in PASSES:
            seconds[name][depth] = found[name]
    here = environment()
    peak = next((speed for card, speed in BF16_OPERATIONS.items() if card in here["device"]), None)
    passes = []
    for name, times in PASSES.items():
        one = by_part(name, seconds[name], whole.num_hidden_layers)
        operations = times * forward_operations(whole, tokens)
        passes.append(one | {"share": None if peak is None else operations / one["whole_s"] / peak})
    settings = {"model": model, "layers": depths, "tokens": tokens, "repeats": repeats}
    write_json(output / "training.json", {"settings": settings, "environment": here, "passes": passes})
    rows = [
        [
            one["name"],
            *(f"{1e3 * one[part]:.2f}" for part in ("layer_s", "head_s", "whole_s")),
            "-" if one["share"] is None else f"{one['share']:.0%}",
        ]
        for one in passes
    ]
    header = ("pass", "layer ms", "head ms", "whole model ms", "of the data sheet's BF16")
    show(f"{model} on {here['device']}, one sequence of {tokens} tokens", header, rows)
    print(f"written: {output / 'training.json'}")


if __name__ == "__main__":
    run(training)
