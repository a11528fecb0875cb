# SPDX-License-Identifier: Apache-2.0
"""`flashrl data`: a published data set as the parquet files that verl trains and validates on.

Hugging Face `datasets` loads it, from the hub or from this machine. Copies of a prompt go, and answers are written as
verl's rewards compare them.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashrl_verl.errors import ConfigError, DataError
from flashrl_verl.trainer.atomic_write import write_whole

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]


# ---- rows: published, then verl's ----

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""What verl's examples/data_preprocess/gsm8k.py asks after the question, and what its reward looks for."""

BOXED_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
"""As math_dataset.py has it. Its reward compares text: 1,000 is not 1000."""


def from_math(row: Row) -> Row:
    """A row of DAPO-Math-17k or AIME-2024, which are published in verl's format.

    Leading zeros of the answer go: `math_dapo` compares text, so that 33 would be wrong where the truth is 033.

    Args:
        row: data_source, prompt, ability, reward_model {style, ground_truth}.
    """
    prompt = [{"role": message["role"], "content": message["content"]} for message in row["prompt"]]
    style, answer = row["reward_model"]["style"], str(int(row["reward_model"]["ground_truth"]))
    return _verl_row(row["data_source"], prompt, row["ability"], style, answer)


def from_gsm8k(row: Row) -> Row:
    """A row of GSM8K, asked as verl's example asks.

    Args:
        row: question, and answer: a solution that ends in "#### " and a number.
    """
    found = re.search(r"#### (-?[0-9.,]+)", row["answer"])  # verl's own expression
    if found is None:
        raise ValueError('an answer that does not end in "#### " and a number')
    answer = found.group(1).replace(",", "")
    float(answer)  # or it is dots and commas alone
    prompt = [{"role": "user", "content": f"{row['question']} {GSM8K_INSTRUCTION}"}]
    return _verl_row("openai/gsm8k", prompt, "math", "rule", answer)


def from_gsm8k_boxed(row: Row) -> Row:
    """The same for a model that answers in ``\\boxed{}``: Qwen2.5-Coder never writes ####. The data_source is that by
    which verl chooses its reward for MATH."""
    made = from_gsm8k(row)
    prompt = [{"role": "user", "content": f"{row['question']} {BOXED_INSTRUCTION}"}]
    return made | {"data_source": "lighteval/MATH", "prompt": prompt}


def _verl_row(source: str, prompt: list[Row], ability: str, style: str, answer: str) -> Row:
    reward_model = {"style": style, "ground_truth": answer}
    return {"data_source": source, "prompt": prompt, "ability": ability, "reward_model": reward_model}


# ---- what there is ----


@dataclass(frozen=True, kw_only=True)
class Published:
    """A split of a published data set, and the file that is made of it."""

    split: str
    """What it is for: train or test."""
    hub_id: str
    revision: str
    """Commit that is loaded: a branch could change between two runs."""
    config: str | None = None
    """On the hub, for a repository that has several."""
    hub_split: str
    path: str
    """Of the split's file in the repository."""
    columns: tuple[str, ...]
    convert: Callable[[Row], Row]
    keep_duplicates: bool
    """Whether copies of a prompt stay, those with another answer too."""
    output: str
    """Name of the prepared file: what the experiments' `data.train_files` or `data.val_files` say."""


_MATH_COLUMNS = ("data_source", "prompt", "ability", "reward_model")

CATALOG = {
    # 1,791,700 rows: every prompt 100 times or more, 7 of them with two different answers
    # (https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k/discussions/3).
    "dapo-math-17k": [
        Published(
            split="train",
            hub_id="BytedTsinghua-SIA/DAPO-Math-17k",
            revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
            hub_split="train",
            path="data/dapo-math-17k.parquet",
            columns=_MATH_COLUMNS,
            convert=from_math,
            keep_duplicates=False,
            output="dapo-math-17k.parquet",
        )
    ],
    # 960 rows: 30 problems, 32 times each, so that one sample a row is avg@32.
    "aime-2024": [
        Published(
            split="test",
            hub_id="BytedTsinghua-SIA/AIME-2024",
            revision="aa49075e24ad594b79fdf0bdcefa735c2181be67",
            hub_split="train",
            path="data/aime-2024.parquet",
            columns=_MATH_COLUMNS,
            convert=from_math,
            keep_duplicates=True,
            output="aime-2024.parquet",
        )
    ],
    **{
        name: [
            Published(
                split=split,
                hub_id="openai/gsm8k",
                revision="740312add88f781978c0658806c59bc2815b9866",
                config="main",
                hub_split=split,
                path=f"main/{split}-00000-of-00001.parquet",
                columns=("question", "answer"),
                convert=convert,
                keep_duplicates=True,
                output=f"{name}-{split}.parquet",
            )
            for split in ("train", "test")
        ]
        for name, convert in (("gsm8k", from_gsm8k), ("gsm8k-boxed", from_gsm8k_boxed))
    },
}

Name = Enum("Name", {name: name for name in CATALOG}, type=str)
"""For the command line."""


# ---- loading ----

_ENDINGS = (".parquet", ".jsonl", ".json")


def load(wanted: Published, source: Path | None = None) -> tuple[Dataset, str]:
    """Load a split.

    Args:
        wanted: of the catalog.
        source: a file, or a folder with the files as published; None for the hub.

    Returns:
        Its rows, and in words where they are from.

    Raises:
        DataError: it cannot be had, or lacks a column.
    """
    import datasets

    if source is not None:
        path = _local_file(source, wanted)
        kind = "parquet" if path.suffix == ".parquet" else "json"
        words: Row = {"path": kind, "data_files": glob.escape(str(path)), "split": "train"}
        name, remedy = str(path), "a whole file, parquet or one JSON object a line"
    else:
        words = {"path": wanted.hub_id, "name": wanted.config, "revision": wanted.revision, "split": wanted.hub_split}
        name = f"{wanted.hub_id} at {wanted.revision}"
        remedy = (
            f"where there is a network, `hf download {wanted.hub_id} --repo-type dataset --revision {wanted.revision} "
            "--local-dir FOLDER`; then here --source FOLDER"
        )
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(**words)
    except Exception as error:  # the hub's client, the file system and pyarrow have no class of errors in common
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:300].rstrip(".") or "no rows in it"
        raise DataError(f"{name} was not loaded: {type(cause).__name__}: {reason}. Remedy: {remedy}.") from error
    missing = [column for column in wanted.columns if column not in rows.column_names]
    if missing:
        raise DataError(f"{name} has no column {', '.join(missing)}: its columns are {', '.join(rows.column_names)}.")
    return rows.select_columns(list(wanted.columns)), name


def _local_file(path: Path, wanted: Published) -> Path:
    if path.is_file():
        return path
    names = [wanted.path, Path(wanted.path).name, *(wanted.split + ending for ending in _ENDINGS)]
    for name in names:
        if (path / name).is_file():
            return path / name
    raise DataError(f"--source {path} has no {wanted.split} file: none of {', '.join(names)}.")


# ---- preparing ----


def prepare(rows: Dataset, wanted: Published, where: str) -> tuple[list[Row], list[str]]:
    """Make verl's rows of those that stay, in their order. Copies of a prompt share their `index`.

    Args:
        rows, where: as `load` returns them.
        wanted: what they are.

    Returns:
        The rows, and what was made of how many in words.

    Raises:
        DataError: a row that is not as published, or none that stays.
    """
    from tqdm import tqdm

    made: list[Row] = []
    prompts: dict[tuple, dict[str, Row]] = {}  # by prompt, then by answer: equal rows are one object
    every = 0.1 if sys.stderr.isatty() else 10.0  # seconds
    for number, row in enumerate(tqdm(rows, f"reading {where}", leave=False, mininterval=every, delay=every)):
        try:
            example = wanted.convert(row)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"row {number} of {where}, from 0, is not as published: {type(error).__name__}: {error}. Nothing was "
                "written. Remedy: mend or remove it, and name the file in --source."
            ) from error
        prompt = tuple((message["role"], message["content"]) for message in example["prompt"])
        made.append(prompts.setdefault(prompt, {}).setdefault(example["reward_model"]["ground_truth"], example))
    kept = [examples for examples in prompts.values() if wanted.keep_duplicates or len(examples) == 1]
    if not kept:
        raise DataError(f"{where}: none of its {len(rows):,} rows stays; nothing was written.")
    for index, examples in enumerate(kept):
        for example in examples.values():
            example["extra_info"] = {"split": wanted.split, "index": index}
    dropped = {}
    if not wanted.keep_duplicates:
        conflicting = sum("extra_info" not in example for example in made)
        dropped["rows, because copies of their prompt have different answers"] = conflicting
        dropped["copies of a prompt"] = len(made) - conflicting - len(kept)
        made = [example for examples in kept for example in examples.values()]
    counts = f"{len(made):,} rows, {len(kept):,} prompts, from {len(rows):,} rows of {where}"
    return made, [counts, *(f"dropped: {count:,} {what}" for what, count in dropped.items() if count)]


def write(path: Path, rows: list[Row]) -> None:
    """Write rows as parquet, whole or not at all. All data sets get the same columns: verl can mix their files.

    Raises:
        DataError: no space, no rights, ...; what was there before is unchanged.
    """
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.string()
    schema = pyarrow.schema(
        {
            "data_source": text,
            "prompt": pyarrow.list_(pyarrow.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pyarrow.struct({"style": text, "ground_truth": text}),
            "extra_info": pyarrow.struct({"split": text, "index": pyarrow.int64()}),
        }
    )
    content = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), content, compression="zstd")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
    except OSError as error:
        raise DataError(
            f"{path} could not be written: {error.strerror or error}. What was there before is unchanged. Remedy: make "
            "room or allow writing there, or choose another --output."
        ) from error


# ---- the command ----


def data(
    name: Annotated[Name, typer.Argument(help="The data set.", show_default=False)],
    source: Annotated[
        Path | None,
        typer.Option(exists=True, help="A file (.parquet, .jsonl, .json) or folder here; else the Hugging Face hub."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the parquet files.")] = Path("data"),
) -> None:
    """Prepare a data set for verl, as parquet.

    Of dapo-math-17k each prompt stays once, and none with several answers. gsm8k asks for the answer after ####,
    gsm8k-boxed in \\boxed{}, as Qwen2.5-Coder gives it; the reward looks for what the prompt asks.

    A folder for --source has the files as published, or train.jsonl and test.jsonl (or .parquet). Their columns are
    question and answer (gsm8k and gsm8k-boxed), or data_source, prompt, ability and reward_model (the others).
    """
    splits = CATALOG[name.value]
    if source is not None and source.is_file() and len(splits) > 1:
        raise ConfigError(f"--source {source} is one file, and {name.value} has {len(splits)}. Name their folder")
    paths = [output.expanduser() / wanted.output for wanted in splits]
    for wanted, path in zip(splits, paths, strict=True):
        if source is not None and path.exists() and _local_file(source, wanted).samefile(path):
            raise ConfigError(f"{path} is the source and the output. Choose another --output.")

    made = []  # all splits are read and checked before the first is written
    for wanted in splits:
        rows, where = load(wanted, source)
        made.append(prepare(rows, wanted, where))
    for path, (rows, words) in zip(paths, made, strict=True):
        write(path, rows)
        typer.echo(f"{path}: " + "\n  ".join(words))
