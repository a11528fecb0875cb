# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench refit``: how long a weight update of a model takes, by precision, against what memory allows.

The weights lie on the device already (gathering them is the trainer's part), one GPU, one process. Measured are the
whole update, as a run does it (cast, accounts, verification), and the loading alone; beside them the ordinary BF16
``load_weights`` and vLLM's own layerwise reload with FP8, and the bandwidth of a copy on the same device in the same
process.
"""

import dataclasses
import datetime
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flashrl_verl.settings import FlashRLConfig, Precision
from flashrl_verl.tools.engines import model as engine_model
from flashrl_verl.tools.engines.shapes import load_config, random_weights, require_host_memory, save_config
from flashrl_verl.tools.software import installed_versions

BUCKET_BYTES = 2 << 30
"""Bytes of weights handed over at once, as verl's 2048 MB buckets."""

_COPY_BYTES = 4 << 30
"""Bytes of the buffer whose copy measures bandwidth; far larger than any cache. A sixty-fourth of it on a CPU."""

_ALIGNMENT = 32
"""Bytes that tensors in a bucket start at multiples of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of updating weights."""

    name: str
    precision: Precision | None
    """None for vLLM without FlashRL."""
    arguments: dict
    """Engine arguments."""
    layerwise: bool = False
    """Whether vLLM's layerwise reload surrounds ``load_weights``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Measurements of one arm; lists have one entry a repeat."""

    arm: str
    source: str
    """Dtype of the weights that arrive."""
    read_bytes: int
    """Bytes of the weights that arrive."""
    written_bytes: int
    """Bytes of the engine's parameters."""
    refit_seconds: list[float]
    load_seconds: list[float]
    """Loading alone, without verification; equal to refit_seconds where there is none."""
    extra_bytes: int | None
    """Peak of device memory during an update above that before it; None on a CPU."""

    @property
    def gigabytes_per_second(self) -> float:
        return (self.read_bytes + self.written_bytes) / 1e9 / statistics.median(self.refit_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What ``run`` measured, and where."""

    model: str
    device: str
    versions: dict[str, str]
    date: str
    copy_gigabytes_per_second: list[float]
    """Bytes read plus bytes written per second."""
    results: list[Result]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def arms(precisions: list[Precision], upstream: bool) -> list[Arm]:
    """Return the arms to measure.

    Args:
        precisions: of FlashRL.
        upstream: whether vLLM's BF16 loading and (on CUDA) its layerwise FP8 reload are measured too.
    """
    from flashrl_verl.plugins.vllm import register
    from flashrl_verl.quantization.config import quantization_config_dict

    register()
    chosen = [
        Arm(
            name=f"flashrl {p.value}",
            precision=p,
            arguments={
                "quantization": "flashrl",
                "hf_overrides": {"quantization_config": quantization_config_dict(FlashRLConfig(precision=p))},
            },
        )
        for p in precisions
    ]
    if upstream:
        chosen.append(Arm(name="vllm bf16 load_weights", precision=None, arguments={}))
        if torch.cuda.is_available():
            arguments = {"quantization": "fp8_per_tensor"}
            chosen.append(
                Arm(name="vllm fp8_per_tensor layerwise", precision=None, arguments=arguments, layerwise=True)
            )
    return chosen


def run(
    model: str,
    precisions: list[Precision],
    folder: Path,
    *,
    source: torch.dtype = torch.bfloat16,
    repeats: int = 5,
    layers: int | None = None,
    upstream: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure every arm in this process.

    Args:
        model: name of a shape, or path of a configuration (``shapes.load_config``).
        precisions: FlashRL's to measure.
        folder: where the model's config.json is written for vLLM.
        source: dtype of the weights that arrive: what the trainer holds.
        repeats: measured updates per arm, after two that are not.
        layers: decoder layers instead of the model's.
        upstream: measure vLLM's own ways too.
        progress: called with a line before each step.

    Returns:
        The measurements.

    Raises:
        ConfigError: the model is not known, or too large for the memory of a machine without a GPU.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_config(model, layers)
    if device.type == "cpu":
        require_host_memory(config, model)
    path = save_config(config, folder / "model")
    progress("bandwidth of a copy")
    copy = copy_bandwidth(device, repeats)
    progress(f"random {str(source).removeprefix('torch.')} weights of {model}")
    weights = list(random_weights(config, source, device, BUCKET_BYTES).items())
    results = []
    for arm in arms(precisions, upstream):
        progress(arm.name)
        with engine_model.model(path, **arm.arguments) as (built, vllm_config):
            measure = _measure_flashrl if arm.precision is not None else _measure_vllm
            results.append(measure(arm, built, vllm_config.model_config, weights, repeats, device))
    versions = installed_versions()
    return Report(
        model=model if layers is None else f"{model}, {layers} layers",
        device=torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)",
        versions={**versions, "python": platform.python_version()},
        date=datetime.date.today().isoformat(),
        copy_gigabytes_per_second=copy,
        results=results,
    )


def copy_bandwidth(device: torch.device, repeats: int) -> list[float]:
    """Measure ``dst.copy_(src)``: GB/s of bytes read plus written, one entry a repeat."""
    size = _COPY_BYTES if device.type == "cuda" else _COPY_BYTES // 64
    src, dst = (torch.ones(size // 2, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = [_timed(lambda: dst.copy_(src), device) for _ in range(repeats + 2)][2:]
    return [2 * size / 1e9 / s for s in seconds]


def _timed(work: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _buckets(weights: list[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket, size = [], 0
    for name, tensor in weights:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket


def _sender(weights, device: torch.device) -> Callable:
    """What turns a bucket into what the engine gets: as it is, or cast into memory that is there already, as in a run,
    where the trainer's bucket is."""
    from flashrl_verl.refit.wire import wire_dtype

    if all(wire_dtype(name, tensor.dtype, torch.bfloat16) == tensor.dtype for name, tensor in weights):
        return list
    room = max(sum(tensor.nbytes + _ALIGNMENT for _, tensor in bucket) for bucket in _buckets(weights))
    memory = torch.empty(room, dtype=torch.uint8, device=device)

    def cast(bucket: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        packed, at = [], 0
        for name, tensor in bucket:
            dtype = wire_dtype(name, tensor.dtype, torch.bfloat16)
            place = memory[at : at + tensor.numel() * dtype.itemsize].view(dtype).view(tensor.shape)
            packed.append((name, place.copy_(tensor)))
            at += -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
        return packed

    return cast


def _with_peak(work: Callable[[], None], device: torch.device) -> int | None:
    if device.type != "cuda":
        work()
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _result(
    arm: Arm, built, weights, refit_seconds: list[float], load_seconds: list[float], extra: int | None
) -> Result:
    return Result(
        arm=arm.name,
        source=str(weights[0][1].dtype).removeprefix("torch."),
        read_bytes=sum(tensor.nbytes for _, tensor in weights),
        written_bytes=sum(parameter.nbytes for parameter in built.parameters()),
        refit_seconds=refit_seconds,
        load_seconds=load_seconds,
        extra_bytes=extra,
    )


def _measure_flashrl(arm: Arm, built, model_config, weights, repeats: int, device: torch.device) -> Result:
    from flashrl_verl.refit.load import WeightRefit

    send = _sender(weights, device)
    refit = WeightRefit(built, model_config, device)
    buckets = list(_buckets(weights))  # the sender's work
    step = 0
    load_seconds = []

    def update() -> None:
        nonlocal step
        refit.begin(step)
        for bucket in buckets:
            refit.load(send(bucket))
        load_seconds.append(refit.finish()["seconds"]["load"])
        step += 1

    update()
    update()
    extra = _with_peak(update, device)
    refit_seconds = [_timed(update, device) for _ in range(repeats)]
    return _result(arm, built, weights, refit_seconds, load_seconds[-repeats:], extra)


def _measure_vllm(arm: Arm, built, model_config, weights, repeats: int, device: torch.device) -> Result:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from flashrl_verl.refit.sender import cast_for_rollout

    def update() -> None:
        if arm.layerwise:
            initialize_layerwise_reload(built)
        # All at once: the layerwise reload keeps the tensors of a layer until it is complete.
        built.load_weights(cast_for_rollout(weights, torch.bfloat16))
        if arm.layerwise:
            finalize_layerwise_reload(built, model_config)

    update()
    update()
    extra = _with_peak(update, device)
    seconds = [_timed(update, device) for _ in range(repeats)]
    return _result(arm, built, weights, seconds, seconds, extra)
