# SPDX-License-Identifier: Apache-2.0
"""``flashrl/*`` from numbers that the trainer has: what the rollout is, and its refit; and their file.

Nothing here needs Ray or verl; ``trainer.py`` says when it is called.
"""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from flashrl_verl.errors import listed
from flashrl_verl.fp32_head import FP32
from flashrl_verl.settings import KVCache
from flashrl_verl.trainer.atomic_write import write_atomically


def refit_metrics(reports: list[dict], receipt: dict) -> dict[str, float]:
    """Metrics of one weight update.

    Args:
        reports: of the engine workers (``WeightRefit.finish``): the slowest worker's seconds count, and of what is
            quantized the quantized replicas' weights and share of changed codes.
        receipt: of a trainer rank; all are alike.
    """
    slowest = max(reports, key=lambda r: r["seconds"]["total"])
    seconds = slowest["seconds"]
    metrics = {
        "flashrl/refit_seconds": seconds["total"],
        # Of them, in the engine; the rest is FSDP's gathering, the cast, and moving the bytes.
        "flashrl/refit_quantize_seconds": seconds["load"],
        "flashrl/refit_verify_seconds": seconds["finish"],
        "flashrl/refit_gigabytes": receipt["bytes"] / 1e9,
        "flashrl/refit_tensors": receipt["count"],
        "flashrl/refit_quantized": max(report["quantized"] for report in reports),
        "flashrl/receipt_step": receipt["step"],
        # One number for "the same weights": equal for equal weights at the same step, also after a resume.
        "flashrl/receipt_sum": receipt["sum"],
    }
    rates = [report["code_change_rate"] for report in reports if report["code_change_rate"] is not None]
    if rates:
        metrics["flashrl/code_change_rate"] = sum(rates) / len(rates)
    return metrics


def summarize_layers(workers: Sequence[dict]) -> dict[str, float]:
    """Metrics of what the rollout is: layers of the first worker, bytes of all.

    Args:
        workers: what they say (``FlashRLWorkerExtension.flashrl_layers``), and their servers have checked
            (``rollout/inspection.py``).
    """
    first = workers[0]
    return {
        "flashrl/quantized_layers": first["quantized_layers"],
        "flashrl/int8_weights": first["quantized"].get("int8", 0),  # of the others FP8
        "flashrl/rotated_weights": first["rotated"],
        "flashrl/unquantized_layers": len(first["unquantized_layers"]),
        "flashrl/fp32_lm_head": int(first["head_dtype"] == FP32),
        "flashrl/kv_cache_bits": 8 if KVCache.INT8_PER_TOKEN_HEAD.value in first["kv_cache"]["dtypes"] else 16,
        "flashrl/weight_bytes": sum(w["weight_bytes"] for w in workers),
        "flashrl/quantized_bytes": sum(w["quantized_bytes"] for w in workers),
        "flashrl/quantized_bytes_as_bf16": sum(w["quantized_bytes_as_bf16"] for w in workers),
    }


def describe_rollout(precision: str, layers: dict[str, float], refit: dict[str, float]) -> str:
    """The log's line on what the rollout is, from the metrics of the two functions above."""
    share = layers["flashrl/quantized_bytes"] / max(1, layers["flashrl/quantized_bytes_as_bf16"])
    kept = f"{share:.3f} of their BF16 bytes" if layers["flashrl/quantized_layers"] else "nothing quantized"
    return (
        f"[flashrl] rollout precision {precision}: {layers['flashrl/quantized_layers']} quantized layers ({kept}), "
        f"{layers['flashrl/rotated_weights']} of their weights rotated, "
        f"{layers['flashrl/weight_bytes'] / 1e6:.2f} MB of weights; first refit {refit['flashrl/refit_tensors']} "
        f"tensors in {refit['flashrl/refit_seconds']:.2f} s, receipt of step {refit['flashrl/receipt_step']} verified "
        f"(sum {refit['flashrl/receipt_sum']})"
    )


def describe_unrotated(worker: dict[str, Any]) -> str:
    """The log's line on quantized weights without rotation; empty where there is none."""
    if not worker["unrotated"]:
        return ""
    return (
        f"[flashrl] {len(worker['unrotated'])} weights are quantized without rotation, as no power of two from 16 on "
        f"divides their input channels on a rank: {listed(worker['unrotated'])}. A "
        "smaller actor_rollout_ref.rollout.tensor_model_parallel_size may help; flashrl.ignore keeps them in BF16"
    )


def describe_never_quantized(worker: dict[str, Any]) -> str:
    """The log's line on matrices that no precision quantizes, layers of all numbers together; empty where none is."""
    found: dict[str, list[int]] = {}
    for name, size in worker["never_quantized"].items():
        found.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(size)
    if not found or not worker["quantized_layers"]:
        return ""
    largest = sorted(found, key=lambda name: -sum(found[name]))
    share = sum(map(sum, found.values())) / worker["weight_bytes"]
    return (
        f"[flashrl] vLLM builds {sum(map(len, found.values()))} layers without a quantization config, which stay in "
        f"high precision ({share:.1%} of the weights): {listed([f'{name} ({len(found[name])})' for name in largest])}"
    )


def metrics_path(project_name: str, experiment_name: str) -> Path:
    """The path verl's file logger would use (``VERL_FILE_LOGGER_PATH``, else ``VERL_FILE_LOGGER_ROOT``)."""
    explicit = os.getenv("VERL_FILE_LOGGER_PATH")
    if explicit:
        return Path(explicit)
    return Path(os.path.expanduser(os.getenv("VERL_FILE_LOGGER_ROOT", "."))) / project_name / f"{experiment_name}.jsonl"


class MetricsFile:
    """verl's file logger, except that a resumed run keeps its history: verl opens its file with ``"wb"``, which erases
    it.

    One ``{"step": n, "data": {...}}`` a line.

    Args:
        path: the file; its folder is made.
        resumed_step: 0 starts a new file. Otherwise lines of later steps (trained, but not in the checkpoint) and a
            torn last line are dropped and the rest is kept.
    """

    def __init__(self, path: Path, resumed_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        history = []
        for line in path.read_bytes().splitlines() if resumed_step > 0 and path.exists() else ():
            with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
                if orjson.loads(line)["step"] <= resumed_step:
                    history.append(line)
        write_atomically(path, b"".join(line + b"\n" for line in history))
        self._file = open(path, "ab", buffering=0)

    def log(self, data: dict, step: int) -> None:
        self._file.write(orjson.dumps({"step": step, "data": data}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def finish(self) -> None:
        self._file.close()
