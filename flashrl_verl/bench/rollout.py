# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench rollout``: how fast a model's shape generates, by precision, and how many tokens its KV cache holds.

Weights are random, made on the GPU and loaded as a run loads them. Arms take turns, round by round, so that a GPU that warms up
or a neighbour that comes and goes does not favour one; what is measured is written at once, and the same command goes on after
a stop. Beside each figure stands what ``flashrl plan`` says.
"""

import datetime
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashrl_verl.bench import engine_process
from flashrl_verl.bench.mismatch_engine import require_precision
from flashrl_verl.bench.rollout_engine import Answer, Job, Timing
from flashrl_verl.bench.shapes import load_config, save_config
from flashrl_verl.compat import check_versions
from flashrl_verl.config import Precision
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.plan.schedule import Work

RESULTS = "rollout.jsonl"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Number formats of one engine."""

    precision: Precision
    kv_cache: str
    """vLLM's ``kv_cache_dtype``; ``auto`` is the model's dtype."""

    def __str__(self) -> str:
        return self.precision.value + ("" if self.kv_cache == "auto" else f" + {self.kv_cache} KV")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What to measure."""

    model: str
    arms: tuple[Arm, ...]
    works: tuple[Work, ...]
    rounds: int
    """How often every arm's engine is started."""
    repeats: int
    """Rollouts of each work in a round."""
    gpu_memory_utilization: float
    tensor_parallel: int
    max_num_seqs: int
    max_num_batched_tokens: int
    layers: int | None
    seed: int
    output: Path


@dataclass(frozen=True, kw_only=True)
class Result:
    """One arm in one round."""

    round: int
    arm: str
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything measured so far, and where."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    results: list[Result]

    def of(self, arm: Arm) -> list[Answer]:
        """An arm's answers, round by round."""
        return [result.answer for result in self.results if result.arm == str(arm)]

    def timing(self, arm: Arm, work: Work) -> Timing | None:
        """An arm's seconds of a work, all rounds together; None before the first."""
        wanted = [work.sequences, work.prompt, work.response]
        found = [t for answer in self.of(arm) for t in answer.timings if t.work == wanted]
        if not found:
            return None
        joined = {field: [s for t in found for s in getattr(t, field)] for field in ("seconds", "prefill_seconds")}
        return Timing(work=wanted, **joined)


def tokens_per_second(timing: Timing) -> list[float]:
    """Generated tokens over the whole time, prefill included; one a repeat."""
    sequences, _, response = timing.work
    return [sequences * response / seconds for seconds in timing.seconds]


def decode_seconds(timing: Timing) -> list[float]:
    """What is left without the prefill and its token: the whole, less the median of the same prompts with one token each."""
    prefill = statistics.median(timing.prefill_seconds)
    return [seconds - prefill for seconds in timing.seconds]


def run(config: RolloutConfig, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Measure what is not in the results yet.

    Args:
        config: what to measure.
        progress: called with a line before each engine.

    Raises:
        ConfigError: the output folder has results of other settings.
        FlashRLError: an engine failed, or is not what its arm says.
    """
    config.output.mkdir(parents=True, exist_ok=True)
    file = config.output / RESULTS
    settings = _settings(config)
    results = _read(file, settings)
    model = save_config(load_config(config.model, config.layers), config.output / "model")
    done = {(result.round, result.arm) for result in results}
    pending = [(i, arm) for i in range(config.rounds) for arm in config.arms if (i, str(arm)) not in done]
    for number, (turn, arm) in enumerate(pending, start=1):
        progress(f"engine {number} of {len(pending)}: {arm}, round {turn + 1} of {config.rounds}")
        answer = _measure(config, arm, model)
        if not file.exists():
            file.write_text(json.dumps({"settings": settings, "environment": _environment()}) + "\n")
        result = Result(round=turn, arm=str(arm), answer=answer)
        with file.open("a") as stream:
            stream.write(json.dumps(asdict(result)) + "\n")
        results.append(result)
    head = json.loads(file.read_text().splitlines()[0])
    return Report(settings=settings, environment=head["environment"], results=results)


def _measure(config: RolloutConfig, arm: Arm, model: Path) -> Answer:
    job = Job(
        model=str(model),
        precision=arm.precision.value,
        kv_cache=arm.kv_cache,
        works=[[work.sequences, work.prompt, work.response] for work in config.works],
        repeats=config.repeats,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel=config.tensor_parallel,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        seed=config.seed,
    )
    module, name = "flashrl_verl.bench.rollout_engine", f"engine {arm}".replace(" ", "-")
    answer = _answer(engine_process.ask(module, name, asdict(job), config.output, title=f"the {arm} engine"))
    require_precision(arm.precision, answer.layers)
    if (arm.kv_cache == "auto") != (answer.memory["kv_dtype"] == "bfloat16"):
        raise FlashRLError(f"--kv-cache {arm.kv_cache}: the engine's KV cache is {answer.memory['kv_dtype']}")
    return answer


def _read(file: Path, settings: dict[str, Any]) -> list[Result]:
    if not file.is_file():
        return []
    head, *rows = map(json.loads, _whole_lines(file))
    if head["settings"] != settings:
        other = [key for key in settings if head["settings"].get(key) != settings[key]]
        raise ConfigError(f"{file} has results of another {', '.join(other)}. Name another folder in --output, or remove it")
    return [Result(round=row["round"], arm=row["arm"], answer=_answer(row["answer"])) for row in rows]


def _whole_lines(file: Path) -> Iterator[str]:
    """Lines that were written to their end; a stop may have torn the last one, which is taken away."""
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return iter(whole.splitlines())


def _answer(record: dict[str, Any]) -> Answer:
    return Answer(**{**record, "timings": [Timing(**timing) for timing in record["timings"]]})


def _settings(config: RolloutConfig) -> dict[str, Any]:
    """What two results have to share to stand in one table."""
    settings = asdict(config)
    for name in ("output", "arms", "rounds"):  # more arms and rounds may be added later
        del settings[name]
    return json.loads(json.dumps(settings))


def _environment() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)",
        "memory_bytes": torch.cuda.mem_get_info()[1] if cuda else None,
        "versions": {finding.component.module: finding.installed for finding in check_versions()},
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
