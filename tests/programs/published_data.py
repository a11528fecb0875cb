# SPDX-License-Identifier: Apache-2.0
"""Small sources in the formats of the published data sets, and the code and the command that read them."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from flashrl_verl.errors import DataError
from flashrl_verl.tools.data.prepare import Request, prepare

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# As the published rows ask.
ASKS = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def math_row(question: str, answer: object, index: object) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": ASKS.format(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def dapo_rows(prompts: int = 6, copies: int = 3, seed: int = 0) -> list[dict]:
    """As DAPO-Math-17k: the same prompts in the same order, `copies` times; identifiers are text."""
    rng = random.Random(seed)
    once = []
    for number in range(prompts):
        a, b = rng.randint(-500, 500), rng.randint(1, 999)
        once.append(math_row(f"Problem {number}: what is {a} - {b}?", str(a - b), f"id-{number:04}"))
    return once * copies


def aime_rows(problems: int = 3, copies: int = 4) -> list[dict]:
    """As AIME-2024: identifiers are numbers, answers have three digits."""
    return [math_row(f"Find {number} + 31.", f"{number + 31:03}", number) for number in range(problems)] * copies


def gsm8k_rows(count: int = 5, seed: int = 0) -> list[dict]:
    """As GSM8K: a solution with its calculations, then the answer, with commas."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.randint(1, 9000), rng.randint(1, 9000)
        solution = f"Together they have {a} + {b} = <<{a}+{b}={a + b}>>{a + b} clips.\n#### {a + b:,}"
        rows.append({"question": f"Ann has {a} clips and Ben has {b}. How many do they have?", "answer": solution})
    return rows


def write_parquet(path: Path, rows: list[dict], group: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gsm8k_folder(path: Path) -> Path:
    """A folder laid out as the repository."""
    write_parquet(path / "main" / "train-00000-of-00001.parquet", gsm8k_rows(5, seed=1))
    write_parquet(path / "main" / "test-00000-of-00001.parquet", gsm8k_rows(4, seed=2))
    return path


def hub_cache(path: Path, repository: str, commit: str, files: dict[str, list[dict]], branch: str = "main") -> Path:
    """A cache as huggingface_hub lays it out: the files of a commit, and a branch that points there."""
    folder = path / f"datasets--{repository.replace('/', '--')}"
    for name, rows in files.items():
        write_parquet(folder / "snapshots" / commit / name, rows)
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    return path


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **variables}


def command(*words: object) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), *map(str, words)]


def prepare_data(*words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run the script as a user does."""
    return subprocess.run(
        command(*words), cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=400
    )


def quiet(doing, done, total):
    """Nobody watches."""


def make(name, source, output, **options):
    return prepare(Request(name=name, source=str(source), output=output, **options), quiet)


def refused(name, source, output, **options) -> str:
    """The message of a refusal, which leaves nothing behind."""
    with pytest.raises(DataError) as caught:
        make(name, source, output, **options)
    assert not output.exists() or not list(output.iterdir())
    return str(caught.value)
