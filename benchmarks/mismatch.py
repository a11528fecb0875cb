# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench mismatch``: how far the rollout's policy is from the trainer's, by precision and KV cache, without
training.

One vLLM engine after another, BF16 first, gets the model's weights as a run sends them and samples at temperature 1
(``mismatch_engine.py``); then the trainer's side (``mismatch_trainer.py``) gives its log-probs of the very same tokens.
Two sets of tokens are compared: each engine's own samples, which is what a run logs, and the BF16 engine's samples
scored by all of them, so that precisions differ in nothing but precision (of an 8-bit engine's log-probs the k3 mean is
then a distance, not an unbiased estimate of a KL divergence). Last, what quantization does to each type of layer
(``mismatch_noise.py``). One GPU or CPU; engines run eagerly, without CUDA graphs.
"""

import datetime
import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.mismatch_kept import KeptAnswers
from benchmarks.mismatch_metrics import log_prob_metrics
from benchmarks.mismatch_model import TOY, checkpoint, require_room
from benchmarks.mismatch_noise import NoiseMeter, TypeNoise, measure
from benchmarks.mismatch_prompts import Prompts, load_prompts
from benchmarks.mismatch_trainer import Trainer
from flashrl_verl.errors import ConfigError
from flashrl_verl.plugins.versions import vllm_device
from flashrl_verl.quantization.formats import weight_format
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.engines.arms import Arm
from flashrl_verl.tools.engines.mismatch_engine import Answer, Job
from flashrl_verl.tools.software import installed_versions

_BF16 = Arm(precision=Precision.BF16)

_ACTIVATION_TOKENS = 2048
"""Tokens whose activations go through every layer in float64."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MismatchConfig:
    """What the command line of ``flashrl bench mismatch`` says."""

    model: str = TOY
    """``toy``, or a folder with a Hugging Face checkpoint in high precision and its tokenizer."""
    arms: tuple[Arm, ...] = tuple(
        Arm(precision=precision) for precision in (Precision.BF16, Precision.INT8, Precision.FP8)
    )
    """To compare; BF16 is measured in any case, because it samples the common tokens and is what others are judged
    by."""
    prompts: int = 1024
    """Prompts, one response each; at least 2."""
    tokens: int = 64
    """Longest response, in tokens; at least 1."""
    data: Path | None = None
    """Parquet file in verl's format; None asks the toy task's additions."""
    gpu_memory_utilization: float | None = None
    """Share of the GPU for an engine; None for most of what is free."""
    seed: int = 0
    """Of the prompts, the sampling and the toy model."""
    output: Path = Path("outputs/bench_mismatch")
    """Folder of the results, the engines' logs and the toy model."""


@dataclass(frozen=True, kw_only=True)
class PrecisionResult:
    """Measurements of one precision."""

    precision: str
    kv_cache: str
    """``flashrl.kv_cache``; in the noise it plays no part."""
    kernels: dict[str, str]
    """Of linear layers and experts."""
    quantized_layers: int
    """vLLM's layers with 8-bit weights, as the live engine has them."""
    unquantized_layers: int
    """Linear layers it keeps in BF16."""
    updated_tensors: int
    """That each of its weight updates brought."""
    own: dict[str, float]
    """``log_prob_metrics`` on the engine's own samples: log-probs as sampled."""
    common: dict[str, float]
    """The same on the BF16 engine's samples, teacher-forced."""
    noise: list[TypeNoise]
    seconds: dict[str, float]
    """Of the engine: start, load, sample, score."""

    @property
    def arm(self) -> Arm:
        """Its formats."""
        return Arm(precision=Precision(self.precision), kv_cache=KVCache(self.kv_cache))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ``run`` measured, and where."""

    model: str
    prompts: str
    """Where the prompts are from."""
    device: str
    trainer: str
    """How the trainer's side computes."""
    engine: str
    """How the engines run."""
    activation_tokens: int
    """Tokens behind the outputs' ratios."""
    versions: dict[str, str | None]
    date: str
    seed: int
    seconds: float
    """Of the command that ended it: without the engines that one before a stop had asked."""
    results: list[PrecisionResult]

    def to_json(self) -> str:
        """JSON; numbers that are not finite (the ratio of an exact weight) become null."""
        return json.dumps(_finite(asdict(self)), indent=1, allow_nan=False)


def run(config: MismatchConfig, progress: Progress = lambda text: None) -> Report:
    """Measure every arm.

    Args:
        config: what to measure.
        progress: called with a line before each step.

    Raises:
        ConfigError: an option cannot be carried out; the message names it.
        FlashRLError: an engine failed; the message has its error and its log.
    """
    from omegaconf import OmegaConf

    from flashrl_verl.platforms import activate

    started = time.monotonic()
    device = torch.device(vllm_device())
    activate(OmegaConf.create({"trainer": {"device": device.type}}))
    arms = _ordered(config.arms)
    config.output.mkdir(parents=True, exist_ok=True)
    model = checkpoint(config, progress)
    prompts = load_prompts(model, config.data, config.prompts, config.seed)
    require_room(model, prompts, config.tokens)
    kept = KeptAnswers(config.output, _device_name(device))
    answers = _answers(config, model, prompts, arms, kept, progress)
    progress("trainer: loading the model")
    trainer = Trainer(model, device)
    common = answers[_BF16].responses
    progress("trainer: log-probs of the common tokens")
    theirs = {_BF16: trainer.log_probs(prompts.tokens, common)}
    for arm in arms[1:]:
        progress(f"trainer: log-probs of the {arm} engine's tokens")
        theirs[arm] = trainer.log_probs(prompts.tokens, answers[arm].responses)
    progress("signal-to-noise ratios of every layer")
    meter = NoiseMeter({arm.precision.value: weight_format(arm.precision) for arm in arms})
    sequences = _some([[*p, *r] for p, r in zip(prompts.tokens, common, strict=True)], _ACTIVATION_TOKENS)
    measure(trainer, meter, sequences, _left_alone(answers))
    return Report(
        model=config.model,
        prompts=prompts.source,
        device=_device_name(device),
        trainer=f"transformers, BF16 weights under autocast to BF16, SDPA, log-probs in {trainer.log_prob_dtype}",
        engine="vLLM, eager (no CUDA graphs)",
        activation_tokens=sum(map(len, sequences)),
        versions=installed_versions() | {"python": platform.python_version()},
        date=datetime.date.today().isoformat(),
        seed=config.seed,
        seconds=round(time.monotonic() - started, 1),
        results=[_result(arm, answers[arm], theirs[arm], theirs[_BF16], meter) for arm in arms],
    )


def _result(
    arm: Arm, answer: Answer, own: list[list[float]], common: list[list[float]], meter: NoiseMeter
) -> PrecisionResult:
    """Compare an engine with the trainer's log-probs of its ``own`` responses and of the ``common`` ones."""
    return PrecisionResult(
        precision=arm.precision.value,
        kv_cache=arm.kv_cache.value,
        kernels=answer.kernels,
        quantized_layers=answer.layers["quantized_layers"],
        unquantized_layers=len(answer.layers["unquantized_layers"]),
        updated_tensors=answer.updated,
        own=log_prob_metrics(own, answer.log_probs),
        common=log_prob_metrics(common, answer.common_log_probs),
        noise=meter.by_type(arm.precision.value),
        seconds=answer.seconds,
    )


def _ordered(arms: Sequence[Arm]) -> list[Arm]:
    """BF16 first, each once.

    Raises:
        ConfigError: no kernel for one of them on this device.
    """
    from flashrl_verl.quantization.config import require_kv_kernel
    from flashrl_verl.quantization.gemm import device_kernels

    chosen = list(dict.fromkeys([_BF16, *arms]))
    for arm in chosen:
        fmt = weight_format(arm.precision)
        try:
            if fmt is not None:
                device_kernels(fmt)
            require_kv_kernel(arm.kv_cache)
        except ConfigError as error:
            raise ConfigError(f"--precision: {arm}: {error}") from error
    return chosen


def _answers(
    config: MismatchConfig, model: Path, prompts: Prompts, arms: list[Arm], kept: KeptAnswers, progress: Progress
) -> dict[Arm, Answer]:
    """Of every arm's engine, by ``kept``: what a stopped command had is not measured again."""
    answers: dict[Arm, Answer] = {}
    for arm in arms:
        job = Job(
            model=str(model),
            precision=arm.precision.value,
            kv_cache=arm.kv_cache.value,
            prompts=prompts.tokens,
            tokens=config.tokens,
            stop_token_ids=prompts.stop_token_ids,
            vocab_size=prompts.vocab_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            seed=config.seed,
            common=answers[_BF16].responses if answers else None,
        )
        answers[arm] = kept.ask(job, progress)
    return answers


def _left_alone(answers: dict[Arm, Answer]) -> set[str]:
    """Layers that no 8-bit engine quantized."""
    kept = [
        set(answer.layers["unquantized_layers"])
        for arm, answer in answers.items()
        if arm.precision is not Precision.BF16
    ]
    return set.intersection(*kept) if kept else set()


def _some(sequences: list[list[int]], tokens: int) -> list[list[int]]:
    """As many of the first sequences as have at most ``tokens`` tokens together, one at least."""
    chosen, total = [], 0
    for sequence in sequences:
        total += len(sequence)
        if chosen and total > tokens:
            break
        chosen.append(sequence)
    return chosen


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
