# SPDX-License-Identifier: Apache-2.0
"""How long a weight update of a model takes, by precision, beside vLLM's own ways.

    python -m benchmarks.refit --model qwen2.5-14b

The weights lie on the device already: gathering and sending them is the trainer's part. One GPU, a process a variant.
Measured are the whole update, as a run does it with its checks, and the loading alone.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import environment, in_own_process, ranged, run, show, words_of, write_json

UPSTREAM = ("vllm bf16 load_weights", "vllm fp8_per_tensor layerwise")
"""vLLM's own ways, on a GPU."""


def timed(work: Callable[[], Any]) -> float:
    """Seconds of a call, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(variant: str, folder: str, repeats: int) -> dict[str, Any]:
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    buckets = list(models.buckets(Path(folder), device))
    with models.model(Path(folder), **arguments) as (built, vllm_config):
        loading: list[float] = []
        if ours:
            update = our_update(built, vllm_config.model_config, buckets, loading)
        else:
            update = their_update(built, vllm_config.model_config, buckets, "layerwise" in variant)
        update()
        update()
        extra = extra_bytes(update)
        seconds = [timed(update) for _ in range(repeats)]
        return {
            "variant": variant,
            "read_bytes": sum(tensor.nbytes for bucket in buckets for _, tensor in bucket),
            "written_bytes": sum(parameter.nbytes for parameter in built.parameters()),
            "refit_seconds": seconds,
            "load_seconds": loading[-repeats:] or seconds,
            "extra_bytes": extra,
        }


def our_update(built: Any, model_config: Any, buckets: list, loading: list[float]) -> Callable:
    """FlashRL's, with its checks; appends the seconds of loading alone."""
    from flashrl_verl.refit.load import WeightRefit

    refit = WeightRefit(built, model_config, buckets[0][0][1].device)

    def update() -> None:
        refit.begin(len(loading))
        for bucket in buckets:
            refit.load(bucket)
        loading.append(refit.finish()["seconds"]["load"])

    return update


def their_update(built: Any, model_config: Any, buckets: list, layerwise: bool) -> Callable:
    """vLLM's."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    def update() -> None:
        if layerwise:
            initialize_layerwise_reload(built)
        built.load_weights(itertools.chain.from_iterable(buckets))
        if layerwise:
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


def table(records: Iterable[dict[str, Any]]) -> list[list[str]]:
    """A weight update, by model and way of updating; header first."""
    rows = [["model", "variant", "update ms", "loading ms", "extra MiB"]]
    for record in records:
        for one in record["results"]:
            form = ".0f" if min(one["refit_seconds"]) > 1 else ".1f"
            update = ranged([1e3 * s for s in one["refit_seconds"]], form)
            loading = f"{1e3 * statistics.median(one['load_seconds']):{form}}"
            rows.append([record["model"], one["variant"], update, loading, f"{one['extra_bytes'] / 2**20:.0f}"])
    return rows


def refit(
    model: Annotated[str, typer.Option(help="A name (qwen2.5-14b, tiny, ...), or a config.json's folder.")] = "tiny",
    precision: Annotated[str, typer.Option(help="Or int8-unrotated, separated by commas.")] = "int8,fp8,bf16",
    repeats: Annotated[int, typer.Option(min=1, help="Measured updates, after two that are not.")] = 5,
    upstream: Annotated[bool, typer.Option(help="Also vLLM's BF16 loading and layerwise FP8 reload (GPU).")] = True,
    output: Annotated[Path, typer.Option(help="Folder for refit.json and logs.")] = Path("outputs/refit"),
) -> None:
    """Time the weight update of a model's shape, by precision."""
    from benchmarks.engine import FP8_VERL, WEIGHTS
    from flashrl_verl.tools.engines.shapes import load_config

    names = [f"flashrl {p}" for p in words_of(precision, [name for name in WEIGHTS if name != FP8_VERL], "--precision")]
    path = output.resolve() / "model"
    load_config(model).save_pretrained(path)
    results = []
    for name in [*names, *(UPSTREAM if upstream and torch.cuda.is_available() else ())]:
        print(f"{name}: started", flush=True)
        log = output / f"{name.replace(' ', '-')}.log"
        results.append(in_own_process(measure, name, str(path), repeats, log=log))
    here = environment()
    record = {"model": model, "device": here["device"], "versions": here, "results": results}
    write_json(output / "refit.json", record)
    header, *rows = table([record])
    show(f"Weight update on {here['device']}", header, rows)
    print(f"written: {output / 'refit.json'}")


if __name__ == "__main__":
    run(refit)
