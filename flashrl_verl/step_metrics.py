# SPDX-License-Identifier: Apache-2.0
"""``flashrl/*`` from numbers that the trainer has: what the rollout is, its refit, and where a step's time went.

Plain functions without Ray or verl; ``trainer.py`` says when they are called.
"""

from collections.abc import Mapping, Sequence

from flashrl_verl.config import KVCache, Precision
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.lm_head import FP32

PHASES = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"),
    *("save_checkpoint", "update_weights"),
)
"""verl's timers (``timing_s/<phase>``) that follow one another within its timer ``step``. Validation is not part of a step."""

_TRAINER_PHASES = ("old_log_prob", "ref", "values", "update_critic", "update_actor")
"""Those that pass every prompt and response through a model of the trainer."""


def phase_metrics(
    seconds: Mapping[str, float], generated_tokens: int, trained_tokens: int, *, bypass: bool = False
) -> dict[str, float]:
    """Speed and share of the step of each phase.

    Args:
        seconds: verl's timers of the step; ``step`` is the whole of it.
        generated_tokens: response tokens that the engines returned, those of groups that dynamic sampling dropped included.
        trained_tokens: prompt and response tokens of the batch, verl's padding rows included.
        bypass: in bypass mode verl copies the rollout's log-probs in the phase ``old_log_prob``, and no model runs.

    Returns:
        ``flashrl/share_<phase>``, 0 to 1, which sum to 1 with ``flashrl/share_other``; and, of all devices together,
        ``flashrl/tokens_per_second_<phase>``: generated tokens for ``gen``, the batch's for the trainer's passes (once,
        whatever ``ppo_epochs`` is) and ``step``. ``gen`` is the trainer's phase: rewards in the agent loop, polling and
        putting the engines to sleep are in it, so the engines are at least as fast.
    """
    there = {phase: seconds[phase] for phase in PHASES if phase in seconds}
    whole = max(seconds["step"], 1e-9)
    metrics = {f"flashrl/share_{phase}": spent / whole for phase, spent in there.items()}
    metrics["flashrl/share_other"] = max(0.0, 1.0 - sum(there.values()) / whole)
    tokens = {"gen": generated_tokens, "step": trained_tokens, **dict.fromkeys(_TRAINER_PHASES, trained_tokens)}
    if bypass:
        del tokens["old_log_prob"]
    for phase, count in tokens.items():
        if phase in seconds:
            metrics[f"flashrl/tokens_per_second_{phase}"] = count / max(seconds[phase], 1e-9)
    return metrics


def refit_metrics(reports: list[dict]) -> dict[str, float]:
    """Metrics of one weight update from the engine workers' reports: the slowest worker's seconds, one worker's bytes, and of
    what is quantized the quantized replicas' tensors and share of changed codes."""
    slowest = max(reports, key=lambda r: r["seconds"]["total"])
    seconds, receipt = slowest["seconds"], slowest["receipt"]
    metrics = {
        "flashrl/refit_seconds": seconds["total"],
        # FSDP's gathering and the cast on the trainer, moving the bytes, quantizing and loading, verification in the engine.
        "flashrl/refit_gather_seconds": seconds["gather"],
        "flashrl/refit_cast_seconds": seconds["cast"],
        "flashrl/refit_transfer_seconds": seconds["transfer"],
        "flashrl/refit_quantize_seconds": seconds["load"],
        "flashrl/refit_verify_seconds": seconds["finish"],
        "flashrl/refit_gigabytes": receipt["bytes"] / 1e9,
        "flashrl/refit_gigabytes_per_second": receipt["bytes"] / 1e9 / max(seconds["total"], 1e-9),
        "flashrl/refit_quantize_gigabytes_per_second": receipt["bytes"] / 1e9 / max(seconds["load"], 1e-9),
        "flashrl/refit_tensors": receipt["tensors"],
        "flashrl/refit_updated": slowest["updated"],
        "flashrl/refit_quantized": max(report["quantized"] for report in reports),
        "flashrl/refit_left_alone": len(slowest["left_alone"]),
        "flashrl/receipt_step": receipt["step"],
        "flashrl/receipt_checksums": len(receipt["checksums"]),
        # One number for "the same weights": equal for equal weights at the same step, also after a resume.
        "flashrl/receipt_sum": sum(receipt["checksums"].values()) % 2**32,
    }
    rates = [report["code_change_rate"] for report in reports if report["code_change_rate"] is not None]
    if rates:
        metrics["flashrl/code_change_rate"] = sum(rates) / len(rates)
    return metrics


def kv_scale_metrics(replicas: Sequence[Sequence[Mapping[str, float] | None]]) -> dict[str, float]:
    """The largest scales of an FP8 KV cache over all workers, as their attention uses them.

    Args:
        replicas: of each replica's workers (``FlashRLWorkerExtension.flashrl_kv_scales``); None in a replica with a BF16 cache.

    Raises:
        FlashRLError: no worker has any.
    """
    scales = [worker for workers in replicas for worker in workers if worker is not None]
    if not scales:
        raise FlashRLError(
            "flashrl.kv_cache=fp8, but no engine derived scales from the weights it was sent: check `flashrl version`, or set "
            "flashrl.kv_cache=auto"
        )
    return {
        "flashrl/kv_cache_q_scale": max(scale["q"] for scale in scales),
        "flashrl/kv_cache_k_scale": max(scale["k"] for scale in scales),
        "flashrl/kv_cache_v_scale": max(scale["v"] for scale in scales),
    }


def summarize_layers(replicas: Sequence[Sequence[dict]], wanted: Sequence[Precision]) -> dict[str, float]:
    """Metrics of what the rollout is; every replica must be what it was started as, and in all else like the others.

    Args:
        replicas: what each replica's workers say (``FlashRLWorkerExtension.flashrl_layers``).
        wanted: each replica's precision (``replicas.precisions``).

    Returns:
        Layers of a quantized replica (of any, where none is), bytes of all workers together, and the number of replicas in
        BF16. In a mixture ``weight_bytes`` has the BF16 replicas too, the quantized bytes do not, and each replica's layers and
        bytes are there as well, as ``flashrl/replica_<i>_*``.

    Raises:
        ConfigError: replicas or their workers differ in anything but the precisions that are wanted.
    """
    found = [{(w["precision"], w["quantized_layers"], w["head_dtype"]) for w in workers} for workers in replicas]
    right = all(_all_are(want, kinds) for kinds, want in zip(found, wanted, strict=True))
    # One kind of worker for every precision; one head in any case.
    alike = len(set().union(*found)) == len(set(wanted)) and len({head for kinds in found for _, _, head in kinds}) == 1
    if not right or not alike:
        raise ConfigError(
            f"the rollout's workers differ in precision, quantized layers or lm_head: {[sorted(kinds) for kinds in found]} by "
            f"replica, where {[want.value for want in wanted]} was asked for"
        )
    workers = [worker for replica in replicas for worker in replica]
    first = max(workers, key=lambda worker: worker["quantized_layers"])
    metrics = {
        "flashrl/bf16_replicas": sum(want is Precision.BF16 for want in wanted),
        "flashrl/quantized_layers": first["quantized_layers"],
        "flashrl/unquantized_layers": len(first["unquantized_layers"]),
        "flashrl/fp32_lm_head": int(first["head_dtype"] == FP32),
        "flashrl/kv_cache_bits": 16 if set(first["kv_cache"]["dtypes"]) <= KVCache.AUTO.engine_names else 8,
        "flashrl/weight_bytes": sum(w["weight_bytes"] for w in workers),
        "flashrl/quantized_bytes": sum(w["quantized_bytes"] for w in workers),
        "flashrl/quantized_bytes_as_bf16": sum(w["quantized_bytes_as_bf16"] for w in workers),
    }
    if len(set(wanted)) == 1:
        return metrics
    layers = per_replica("quantized_layers", [replica[0]["quantized_layers"] for replica in replicas])
    return metrics | layers | per_replica("weight_bytes", [sum(w["weight_bytes"] for w in replica) for replica in replicas])


def _all_are(wanted: Precision, kinds: set[tuple[str, int, str]]) -> bool:
    quantized = wanted is not Precision.BF16
    return all(precision == wanted.value and (layers > 0) == quantized for precision, layers, _ in kinds)


def per_replica(name: str, values: Sequence[float]) -> dict[str, float]:
    """``flashrl/replica_<i>_<name>``, by verl's rank of the replica."""
    return {f"flashrl/replica_{i}_{name}": value for i, value in enumerate(values)}


def describe_rollout(precision: str, layers: dict[str, float], refit: dict[str, float]) -> str:
    """The log's line on what the rollout is, from the metrics of the two functions above."""
    share = layers["flashrl/quantized_bytes"] / max(1, layers["flashrl/quantized_bytes_as_bf16"])
    kept = f"{share:.3f} of their BF16 bytes" if layers["flashrl/quantized_layers"] else "nothing quantized"
    return (
        f"[flashrl] rollout precision {precision}: {layers['flashrl/quantized_layers']} quantized layers ({kept}), "
        f"{layers['flashrl/weight_bytes'] / 1e6:.2f} MB of weights; first refit {refit['flashrl/refit_tensors']} tensors in "
        f"{refit['flashrl/refit_seconds']:.2f} s, receipt of step {refit['flashrl/receipt_step']} verified "
        f"(sum {refit['flashrl/receipt_sum']})"
    )
