# SPDX-License-Identifier: Apache-2.0
"""``flashrl bench rollout``: how fast a model's shape generates, by precision, and how many tokens its KV cache holds.

Weights are random, made on the GPU and loaded as a run loads them. Arms take turns, round by round, so that a GPU that
warms up or a neighbour that comes and goes does not favour one, or run at the same time on GPUs of their own; what is
measured is written at once, and the same command goes on after a stop. Beside each figure stands what ``flashrl plan``
says.
"""

import datetime
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from benchmarks.rollout_engine import Answer, Job, Timing, require_device
from benchmarks.rollout_kernels import regrouped
from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.engines import process as engine_process
from flashrl_verl.tools.engines.arms import Arm
from flashrl_verl.tools.engines.shapes import load_config, require_host_memory, save_config
from flashrl_verl.tools.engines.visible_gpus import gpu_groups, visible_gpus
from flashrl_verl.tools.plan.schedule import Work
from flashrl_verl.tools.software import package_digest, software
from flashrl_verl.trainer.atomic_write import write_whole

RESULTS = "rollout.jsonl"
_ENGINE = "benchmarks.rollout_engine"


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
    parallel: int = 1
    """Engines at a time, each on GPUs of its own."""
    profile: bool = True
    """Record the kernels of some decode steps, in one more rollout of each work."""

    def __post_init__(self) -> None:
        for option, chosen in (("--arm", self.arms), ("--work", self.works)):
            if not chosen:
                raise ConfigError(f"{option} names none: give one or more, separated by commas")
            if len(set(chosen)) < len(chosen):
                raise ConfigError(
                    f"{option} names one twice: leave it out once; --rounds and --repeats measure more often"
                )


@dataclass(frozen=True, kw_only=True)
class Result:
    """One arm in one round."""

    round: int
    arm: str
    answer: Answer
    parallel: int = 1
    """Engines at a time on the machine, this one among them: they share its cores."""


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
        profiles = [t.profile for t in found if t.profile is not None]
        reasons = [t.unrecorded for t in found if t.unrecorded is not None]
        return Timing(
            work=wanted,
            **joined,
            profile=profiles[-1] if profiles else None,
            unrecorded=reasons[-1] if reasons else None,
        )


def tokens_per_second(timing: Timing) -> list[float]:
    """Generated tokens over the whole time, prefill included; one a repeat."""
    return speeds(timing.work[0] * timing.work[2], timing.seconds)


def speeds(tokens: int, seconds: Sequence[float]) -> list[float]:
    """So many tokens a second, one for each time."""
    return [tokens / s for s in seconds]


def decode_seconds(timing: Timing) -> list[float]:
    """What is left without the prefill and its token: the whole, less the median of the same prompts with one token
    each."""
    prefill = statistics.median(timing.prefill_seconds)
    return [seconds - prefill for seconds in timing.seconds]


def run(config: RolloutConfig, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Measure what is not in the results yet.

    Args:
        config: what to measure.
        progress: called with a line before each engine.

    Raises:
        ConfigError: the output folder has results of other settings, versions or code, or something that is no results;
            the machine has too little memory, or too few GPUs.
        FlashRLError: an engine failed, is not what its arm says, or runs on another device than the results that are
            there. What others have answered by then is kept.
    """
    shape = load_config(config.model, config.layers)
    file = config.output / RESULTS
    # The device is the engine's to tell: asking here would take memory of the GPU from the engines.
    settings, runs = _settings(config, shape), software()
    report = _read(file, settings, runs) or Report(settings=settings, environment={}, results=[])
    done = {(result.round, result.arm) for result in report.results}
    pending = [(i, arm) for i in range(config.rounds) for arm in config.arms if (i, str(arm)) not in done]
    if not pending:
        return report
    _require_code(report, file)
    if not visible_gpus():
        require_host_memory(shape, config.model)
    places = gpu_groups(config.parallel, config.tensor_parallel)
    config.output.mkdir(parents=True, exist_ok=True)
    model = save_config(shape, config.output / "model")

    def questions() -> Iterator[engine_process.Question[tuple[int, Arm]]]:
        for number, (turn, arm) in enumerate(pending, start=1):
            progress(f"engine {number} of {len(pending)}: {arm}, round {turn + 1} of {config.rounds}")
            job = _job(config, arm, model, report.environment.get("device"))
            name = f"engine {arm}{f' {turn + 1}' if config.rounds > 1 else ''}".replace(" ", "-")
            yield engine_process.Question(key=(turn, arm), name=name, job=asdict(job), title=f"the {arm} engine")

    arms = [*(result.arm for result in report.results), *map(str, config.arms)]

    def order(result: Result) -> tuple[int, int]:
        return result.round, arms.index(result.arm)

    with closing(engine_process.answers(_ENGINE, questions(), config.output, places)) as answers:
        for (turn, arm), record in answers:
            answer = _answer(record)
            if not report.environment:
                where = {name: answer.device[name] for name in ("device", "memory_bytes")}
                now = {"package": package_digest(), "date": datetime.date.today().isoformat()}
                report.environment.update(where | runs | now)
            require_device(answer.device, report.environment["device"])
            report.results.append(Result(round=turn, arm=str(arm), answer=answer, parallel=config.parallel))
            report.results.sort(key=order)  # engines at the same time end in any order
            _write(file, report)
    return report


def _job(config: RolloutConfig, arm: Arm, model: Path, device: str | None) -> Job:
    return Job(
        model=str(model),
        precision=arm.precision.value,
        kv_cache=arm.kv_cache.value,
        works=[[work.sequences, work.prompt, work.response] for work in config.works],
        repeats=config.repeats,
        profile=config.profile,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel=config.tensor_parallel,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        seed=config.seed,
        device=device,
    )


def _write(file: Path, report: Report) -> None:
    """A line for settings and environment, and one for each result."""
    head = {"settings": report.settings, "environment": report.environment}
    lines = [json.dumps(record) for record in (head, *map(asdict, report.results))]
    write_whole(file, ("\n".join(lines) + "\n").encode())


def load(file: Path) -> Report | None:
    """Results that a command wrote; None where it wrote none.

    Raises:
        OSError: the file cannot be read.
        KeyError, TypeError, ValueError, AttributeError: it is another kind of file, or of another release.
    """
    text = file.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # a line that a full disk or a copy cut short is measured again
    if not lines:
        return None
    head, *rows = map(json.loads, lines)
    return Report(
        settings=head["settings"],
        environment=head["environment"],
        results=[Result(**{**row, "answer": _answer(row["answer"])}) for row in rows],
    )


def measured(file: Path) -> tuple[RolloutConfig, Report]:
    """Results, and what was asked for them: the arms that are there. Formats that this release does not have are left
    out.

    Raises:
        OSError: the file cannot be read.
        KeyError, TypeError, ValueError, AttributeError: it holds no results yet, or those of another release.
    """
    report = load(file)
    if report is None or not report.results:
        raise ValueError("no engine has been measured to its end")
    settings = {key: value for key, value in report.settings.items() if key != "config.json"}
    works = tuple(Work(**work) for work in settings.pop("works"))
    named = {str(arm): arm for arm in (Arm(precision=p, kv_cache=k) for p in Precision for k in KVCache)}
    arms = tuple(named[name] for name in dict.fromkeys(result.arm for result in report.results) if name in named)
    rounds = 1 + max((result.round for result in report.results), default=0)
    return RolloutConfig(**settings, works=works, arms=arms, rounds=rounds, output=file.parent), report


def _read(file: Path, settings: dict[str, Any], runs: dict[str, Any]) -> Report | None:
    """What was measured before; None where nothing was.

    Raises:
        ConfigError: it was measured with something else, or cannot be read.
    """
    remedy = "Name another folder in --output, or remove it"
    try:
        if not file.is_file() or (report := load(file)) is None:
            return None
        other = _different(report.settings, settings) + _different(report.environment, runs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} holds no results of this release ({type(error).__name__}: {error}). {remedy}"
        ) from error
    if other:
        raise ConfigError(f"{file} has results of another {', '.join(other)}. {remedy}")
    return report


def _require_code(report: Report, file: Path) -> None:
    """Refuse to put figures of this code beside those of another: a version alone does not tell two apart.

    Raises:
        ConfigError: there are results of other code.
    """
    there, here = report.environment.get("package", "not recorded"), package_digest()
    if report.results and there != here:
        raise ConfigError(
            f"{file} has results of other code of flashrl_verl (digest {there}, now {here}); others do not stand "
            "beside them. Name another folder in --output; flashrl bench rollout-figure shows what is there"
        )


def _different(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    return [
        f"{key} ({there.get(key)}, now {here[key]})" if isinstance(here[key], str) else key
        for key in here
        if there.get(key) != here[key]
    ]


def _answer(record: dict[str, Any]) -> Answer:
    return Answer(**{**record, "timings": [_timing(timing) for timing in record["timings"]]})


def _timing(record: dict[str, Any]) -> Timing:
    profile = record.get("profile")
    return Timing(**{**record, "profile": None if profile is None else regrouped(profile)})


def _settings(config: RolloutConfig, shape: PretrainedConfig) -> dict[str, Any]:
    """What two results have to share to stand in one table, the model's shape among it: a folder's may have changed."""
    settings = asdict(config) | {"config.json": shape.to_dict()}
    for name in ("output", "arms", "rounds", "parallel", "profile"):  # more arms and rounds may be added later
        del settings[name]
    return json.loads(json.dumps(settings))
