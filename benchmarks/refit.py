# SPDX-License-Identifier: Apache-2.0
"""How long a weight update of a model takes, by precision, beside vLLM's own ways.

    python -m benchmarks.refit --model qwen2.5-14b

The weights lie on the device already: gathering and sending them is the trainer's part. One GPU, a process a variant.
Measured are the whole update, as a run does it with its checks, and the loading alone.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import environment, in_own_process, run, show, words_of, write_json
from flashrl_verl.settings import Precision

BUCKET_BYTES = 2 << 30
"""Bytes of weights handed over at once, as verl's 2048 MB buckets."""
PRECISIONS = [*(precision.value for precision in Precision), "int8-unrotated"]
UPSTREAM = ("vllm bf16 load_weights", "vllm fp8_per_tensor layerwise")
"""vLLM's own ways, on a GPU."""

Weights = list[tuple[str, torch.Tensor]]


def device_here() -> torch.device:
    """Where weights lie."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def timed(work: Callable[[], Any]) -> float:
    """Seconds of a call, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def buckets_of(weights: Weights) -> Iterator[Weights]:
    """As verl sends them."""
    bucket, size = [], 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


def random_weights(model: str, layers: int | None) -> Weights:
    """Weights of a model's shape on the device, normal with standard deviation 0.02, behind each other in buffers of
    ``BUCKET_BYTES`` as in verl's buckets."""
    from benchmarks.models import load_config, tensor_shapes

    generator = torch.Generator(device_here()).manual_seed(0)
    weights: Weights = []
    for bucket in buckets_of([(n, t.bfloat16()) for n, t in tensor_shapes(load_config(model, layers))]):
        buffer = torch.empty(sum(t.numel() for _, t in bucket), dtype=torch.bfloat16, device=device_here())
        parts = buffer.normal_(0, 0.02, generator=generator).split([t.numel() for _, t in bucket])
        weights += [(name, part.view(t.shape)) for (name, t), part in zip(bucket, parts, strict=True)]
    return weights


def measure(variant: str, model: str, folder: str, layers: int | None, repeats: int) -> dict[str, Any]:
    """One way of updating weights."""
    from benchmarks import models
    from benchmarks.engine import formats_of
    from flashrl_verl.plugins.vllm import register
    from flashrl_verl.quantization.config import engine_arguments

    register()
    ours = variant.startswith("flashrl ")
    if ours:
        arguments = engine_arguments(formats_of(variant.removeprefix("flashrl ")))
    else:
        arguments = {"quantization": "fp8_per_tensor"} if "fp8" in variant else {}
    weights = random_weights(model, layers)
    with models.model(Path(folder), **arguments) as (built, vllm_config):
        loading: list[float] = []
        make = our_update if ours else their_update
        update = make(built, vllm_config.model_config, weights, loading, variant)
        update()
        update()
        extra = extra_bytes(update)
        seconds = [timed(update) for _ in range(repeats)]
        return {
            "arm": variant,
            "read_bytes": sum(tensor.nbytes for _, tensor in weights),
            "written_bytes": sum(parameter.nbytes for parameter in built.parameters()),
            "refit_seconds": seconds,
            "load_seconds": loading[-repeats:] or seconds,
            "extra_bytes": extra,
        }


def our_update(built: Any, model_config: Any, weights: Weights, loading: list[float], variant: str) -> Callable:
    """FlashRL's, with its checks; appends the seconds of loading alone."""
    from flashrl_verl.refit.load import WeightRefit

    refit, buckets = WeightRefit(built, model_config, device_here()), list(buckets_of(weights))

    def update() -> None:
        refit.begin(len(loading))
        for bucket in buckets:
            refit.load(bucket)
        loading.append(refit.finish()["seconds"]["load"])

    return update


def their_update(built: Any, model_config: Any, weights: Weights, loading: list[float], variant: str) -> Callable:
    """vLLM's."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    def update() -> None:
        if "layerwise" in variant:
            initialize_layerwise_reload(built)
        built.load_weights(iter(weights))
        if "layerwise" in variant:
            finalize_layerwise_reload(built, model_config)

    return update


def extra_bytes(update: Callable[[], None]) -> int:
    """Peak of the GPU's memory during an update above that before it; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    update()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def refit(
    model: Annotated[str, typer.Option(help="A name (qwen2.5-14b, tiny, ...), a config.json, or its folder.")] = "tiny",
    precision: Annotated[str, typer.Option(help="Or int8-unrotated, separated by commas.")] = "int8,fp8,bf16",
    repeats: Annotated[int, typer.Option(min=1, help="Measured updates, after two that are not.")] = 5,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers instead of the model's.")] = None,
    upstream: Annotated[bool, typer.Option(help="Also vLLM's BF16 loading and layerwise FP8 reload (GPU).")] = True,
    output: Annotated[Path, typer.Option(help="Folder for refit.json and logs.")] = Path("outputs/refit"),
) -> None:
    """Time the weight update of a model's shape, by precision."""
    from benchmarks.models import load_config

    names = [f"flashrl {p}" for p in words_of(precision, PRECISIONS, "--precision")]
    cuda = torch.cuda.is_available()
    path = output.resolve() / "model"
    load_config(model, layers).save_pretrained(path)
    results = []
    for name in [*names, *(UPSTREAM if upstream and cuda else ())]:
        print(f"{name}: started", flush=True)
        log = output / f"{name.replace(' ', '-')}.log"
        results.append(in_own_process(measure, name, model, str(path), layers, repeats, log=log))
    here = environment()
    called = model if layers is None else f"{model}, {layers} layers"
    record = {"model": called, "device": here["device"], "versions": here, "results": results}
    write_json(output / "refit.json", record)
    rows = []
    for one in results:
        update, load = (sorted(1e3 * s for s in one[f"{part}_seconds"]) for part in ("refit", "load"))
        shown = f"{statistics.median(update):.1f} ({update[0]:.1f}-{update[-1]:.1f})", f"{statistics.median(load):.1f}"
        rows.append([one["arm"], *shown, f"{one['extra_bytes'] / 2**20:.0f}"])
    header = ("variant", "update ms (range)", "loading ms", "extra MiB")
    show(f"Weight update of {called} on {here['device']}", header, rows)
    print(f"written: {output / 'refit.json'}")


if __name__ == "__main__":
    run(refit)
