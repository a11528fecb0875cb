# SPDX-License-Identifier: Apache-2.0
"""What ``python -m benchmarks mismatch`` asks: the toy task's additions, or the prompts of a data file in verl's
format."""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart.task import TaskConfig, split_problems
from flashrl_verl.tools.engines.prompts import encode, load_tokenizer, stop_token_ids


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts as tokens, and what an engine without a tokenizer has to know of it."""

    tokens: list[list[int]]
    stop_token_ids: list[int]
    """Tokens that end a response (and belong to it)."""
    vocab_size: int
    """Length of the tokenizer; verl masks what an embedding has beyond it."""
    source: str
    """Where they are from, for the report."""


def load_prompts(model: Path, data: Path | None, count: int, seed: int) -> Prompts:
    """Render prompts with a model's chat template.

    Args:
        model: folder with a tokenizer.
        data: parquet file with verl's ``prompt`` column (lists of messages); None for the toy task.
        count: how many; what there is is repeated when it is fewer.
        seed: of their choice.

    Raises:
        ConfigError: no tokenizer, no chat template, or not verl's format; the message names the option.
    """
    tokenizer = load_tokenizer(model, f"--model {model}")
    conversations = _additions(seed) if data is None else _read(data, seed)
    chosen = itertools.islice(itertools.cycle(conversations), count)
    return Prompts(
        tokens=[encode(tokenizer, messages) for messages in chosen],
        stop_token_ids=stop_token_ids(model, tokenizer),
        vocab_size=len(tokenizer),
        source="additions of the toy task" if data is None else str(data),
    )


def _additions(seed: int) -> list[list[dict[str, str]]]:
    problems = split_problems(TaskConfig(), seed=seed).train
    return [[{"role": "user", "content": problem.prompt}] for problem in problems]


def _read(data: Path, seed: int) -> list[list[dict[str, str]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(data, columns=["prompt"]).column("prompt").to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"--data {data} is not a parquet file with a column `prompt`: {error}") from error
    if not rows or not all(isinstance(row, list) and row and isinstance(row[0], dict) for row in rows):
        raise ConfigError(f"--data {data}: its column `prompt` does not hold lists of messages, as verl's data do")
    random.Random(seed).shuffle(rows)
    return rows
