# SPDX-License-Identifier: Apache-2.0
"""``flashrl eval``: the same problems to the same weights in several precisions, one engine after another."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrl_verl.errors import ConfigError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.bar import sha256
from flashrl_verl.tools.evaluate.engine import Answer, Job, ask
from flashrl_verl.tools.evaluate.kept import (
    RESPONSES,
    begin,
    begun,
    clear,
    finished,
    read_answer,
    settings_of,
    write_answer,
)
from flashrl_verl.tools.evaluate.problems import Problem, read_problems
from flashrl_verl.tools.evaluate.report import Evaluated, Report
from flashrl_verl.tools.evaluate.scoring import load_reward, score
from flashrl_verl.tools.export.chosen import layers_of
from flashrl_verl.tools.export.source import RECORD, Checkpoint, open_checkpoint
from flashrl_verl.trainer.atomic_write import write_whole

_GENERATION = "generation_config.json"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What the command line says."""

    checkpoint: Path
    data: tuple[Path, ...]
    precisions: tuple[Precision, ...] = (Precision.BF16,)
    """In this order; the others are compared with the first."""
    samples: int = 8
    """Responses to each problem."""
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 4096
    """Longest response, in tokens."""
    seed: int = 0
    """Of the sampling and of the intervals."""
    limit: int | None = None
    """The first so many problems; None for all."""
    tensor_parallel_size: int = 1
    reward: str | None = None
    """``path:name``; None for verl's default."""
    threshold: float = 1.0
    """Least value of a correct response."""
    layers: dict[str, Any] = dataclasses.field(default_factory=lambda: layers_of(None, (), None, None))
    """Layers that 8-bit precisions keep in BF16."""
    output: Path = Path("outputs/eval")
    force: bool = False
    """Generate again what another evaluation left in ``output``."""

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            said = f"--temperature {self.temperature} --top-p {self.top_p}"
            raise ConfigError(f"{said}: a temperature of at least 0, and a top-p above 0 and up to 1")
        if self.temperature == 0 and self.samples > 1:
            raise ConfigError(f"--temperature 0 is greedy: all --n {self.samples} responses are one. Set --n 1")
        if len(set(self.precisions)) < len(self.precisions):
            raise ConfigError(f"--precision names one twice: {','.join(p.value for p in self.precisions)}")


def run(config: EvalConfig, progress: Progress = lambda doing, done, total: None) -> Report:
    """Evaluate every precision.

    Args:
        config: what.
        progress: told what is done, how much of it, and how much there is.

    Returns:
        The report; responses are in ``config.output``, by precision.

    Raises:
        ConfigError, DataError: something cannot be evaluated so; no engine was started.
        FlashRLError: an engine failed, or held something else than its name says; finished precisions stay finished.
    """
    reward = load_reward(config.reward)
    problems, rows = read_problems(config.data, config.limit)
    for problem in {problem.data_source: problem for problem in problems}.values():
        score(reward, problem, "")  # a source that the reward does not know is found out before hours of generation
    checkpoint = open_checkpoint(config.checkpoint)
    output = config.output.expanduser().resolve()
    prompts, stops, tokenizer = prompts_of(checkpoint, problems, config)
    settings = {p: settings_of(config, checkpoint, prompts, stops, len(tokenizer), p) for p in config.precisions}
    left = [precision for precision in settings if not finished(output, precision, settings[precision], config.force)]
    goes_on = {precision for precision in left if begun(output, precision, settings[precision], config.force)}
    model = _in_bf16(checkpoint, output, progress) if left else None
    for precision in left:
        job = Job(
            model=str(model),
            precision=precision.value,
            layers=config.layers,
            prompts=prompts,
            samples=config.samples,
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_tokens,
            seed=config.seed,
            stop_token_ids=stops,
            vocab_size=len(tokenizer),
            tensor_parallel_size=config.tensor_parallel_size,
        )
        if precision not in goes_on:
            begin(output / precision.value, settings[precision])
        _generate(job, output / precision.value, settings[precision], progress)
    evaluated = []
    for precision in config.precisions:
        answer = read_answer(output / precision.value)
        texts = [[tokenizer.decode(ids, skip_special_tokens=True) for ids in group] for group in answer.responses]
        values = []
        for done, (problem, group) in enumerate(zip(problems, texts, strict=True), 1):
            values.append([score(reward, problem, text) for text in group])
            progress(f"{precision.value}: scoring", done, len(problems))
        _write_responses(output / precision.value / RESPONSES, problems, texts, values, answer)
        evaluated.append(
            Evaluated(precision=precision.value, values=values, answer=answer, generated=precision in left)
        )
    return Report.of(evaluated, problems, config.threshold, config.seed, _facts(config, checkpoint, rows, settings))


def prompts_of(
    checkpoint: Checkpoint, problems: list[Problem], config: EvalConfig
) -> tuple[list[list[int]], list[int], Any]:
    """Tokens of every prompt, the tokens that end a turn, and the tokenizer.

    Raises:
        ConfigError: the longest prompt and response are beyond the model.
    """
    from transformers import AutoConfig

    from flashrl_verl.tools.engines.prompts import encode, load_tokenizer, stop_token_ids

    tokenizer = load_tokenizer(checkpoint.folder, str(checkpoint.folder))
    prompts = [encode(tokenizer, problem.messages) for problem in problems]
    longest = max(map(len, prompts))
    limit = longest_of(AutoConfig.from_pretrained(checkpoint.folder).get_text_config())
    if limit is not None and longest + config.max_tokens > limit:
        raise ConfigError(
            f"--max-tokens {config.max_tokens}: with the longest prompt's {longest} tokens that is beyond the model's "
            f"{limit}; set --max-tokens {max(limit - longest, 0)} or lower"
        )
    return prompts, stop_token_ids(checkpoint.folder, tokenizer), tokenizer


def longest_of(model: Any) -> int | None:
    """Return how many tokens vLLM lets a model have; None where ``max_position_embeddings`` does not say it.

    Scaled rotary embeddings reach further by their factor, YaRN's from where it started (vLLM's
    ``config/model.py: _get_and_verify_max_len``, which is private).

    Args:
        model: transformers' configuration of the text model.
    """
    limit = getattr(model, "max_position_embeddings", None)
    scaling = getattr(model, "rope_parameters", None) or getattr(model, "rope_scaling", None) or {}
    if limit is None or "gemma3" in model.model_type:  # Gemma 3 gives the length with its scaling
        return limit
    factor = 1.0
    for rope in scaling.values() if all(isinstance(value, dict) for value in scaling.values()) else [scaling]:
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("su", "longrope", "llama3"):  # so do these
            continue
        factor = rope.get("factor") or factor
        if kind == "yarn":
            limit = rope.get("original_max_position_embeddings") or limit
    return int(limit * factor)


def _in_bf16(checkpoint: Checkpoint, output: Path, progress: Progress) -> Path:
    """The folder that engines load: the checkpoint itself, or its export in ``output``, which is made once."""
    if checkpoint.ranks is None:
        return checkpoint.path
    from flashrl_verl.tools.export.export import Request, export

    folder = output / "model"
    if folder.exists():
        if _is_export_of(checkpoint, folder):
            return folder
        clear(folder, RECORD)  # of another checkpoint: `finished` has let it be replaced
    return export(Request(checkpoint=checkpoint.path, output=folder), progress)[0]


def _is_export_of(checkpoint: Checkpoint, folder: Path) -> bool:
    """Whether weights, configuration and generation settings are still the checkpoint's: the engine reads all three."""
    try:
        weights = json.loads((folder / RECORD).read_text())["source_files"]
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, KeyError):
        return False
    kind = dict.fromkeys(("dtype", "torch_dtype", "quantization_config"))  # an export sets the former and drops a null
    files = (folder / _GENERATION, checkpoint.folder / _GENERATION)
    generation = [file.read_bytes() if file.is_file() else b"" for file in files]
    same_config = {**config, **kind} == {**checkpoint.config, **kind}
    return weights == checkpoint.fingerprint() and same_config and generation[0] == generation[1]


def _generate(job: Job, folder: Path, settings: dict[str, Any], progress: Progress) -> None:
    progress(f"{job.precision}: starting the engine", 0, 1)
    answer = ask(job, folder, lambda done, total: progress(f"{job.precision}: responses", done, total))
    write_answer(folder, answer, settings)


def _write_responses(
    path: Path, problems: list[Problem], texts: list[list[str]], values: list[list[float]], answer: Answer
) -> None:
    rows = (
        {
            "problem": number,
            "data_source": problem.data_source,
            "prompt": problem.messages,
            "ground_truth": problem.ground_truth,
            "responses": texts[number],
            "values": values[number],
            "truncated": answer.truncated[number],
        }
        for number, problem in enumerate(problems)
    )
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows).encode())


# ---- what the report says besides figures ----


def _facts(
    config: EvalConfig, checkpoint: Checkpoint, rows: int, settings: dict[Precision, dict[str, Any]]
) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "data": {str(file): sha256(file) for file in config.data},
        "limit": config.limit,
        "rows": rows,
        "reward": config.reward or "verl's default_compute_score",
        "settings": {precision.value: of for precision, of in settings.items()},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
