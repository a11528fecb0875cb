# SPDX-License-Identifier: Apache-2.0
"""`flashrl data`: a published data set as the parquet files that verl trains and validates on.

They are read from the Hugging Face hub or from a folder. Copies of a prompt go, and answers are written as verl's
rewards compare them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.trainer.atomic_write import write_atomically

if TYPE_CHECKING:
    from pyarrow import RecordBatch

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
        raise FlashRLError(f'an answer does not end in "#### " and a number, but: {row["answer"][-100:]!r}')
    prompt = [{"role": "user", "content": f"{row['question']} {GSM8K_INSTRUCTION}"}]
    return _verl_row("openai/gsm8k", prompt, "math", "rule", found.group(1).replace(",", ""))


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
    path: str
    """Of the split's file in the repository."""
    convert: Callable[[Row], Row]
    keep_duplicates: bool
    """Whether copies of a prompt stay, those with another answer too."""
    output: str
    """Name of the prepared file: what the experiments' `data.train_files` or `data.val_files` say."""


CATALOG = {
    # 1,791,700 rows: every prompt 100 times or more, 7 of them with two different answers
    # (https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k/discussions/3).
    "dapo-math-17k": [
        Published(
            split="train",
            hub_id="BytedTsinghua-SIA/DAPO-Math-17k",
            revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
            path="data/dapo-math-17k.parquet",
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
            path="data/aime-2024.parquet",
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
                path=f"main/{split}-00000-of-00001.parquet",
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


# ---- reading and preparing ----


def read(wanted: Published, source: Path | None = None) -> tuple[int, Iterable[RecordBatch]]:
    """Open a split's file: how many rows it has, and the rows.

    Args:
        wanted: of the catalog.
        source: a folder with the files as published there, or as <split>.jsonl; None for the hub.

    Raises:
        FlashRLError: it cannot be had.
    """
    from huggingface_hub import hf_hub_download
    from pyarrow import json, parquet

    file: str | Path = wanted.path if source is None else source / wanted.path
    try:
        if source is not None and (lines := source / f"{wanted.split}.jsonl").is_file():
            table = json.read_json(file := lines)
            return len(table), table.to_batches()
        if source is None:
            file = hf_hub_download(wanted.hub_id, wanted.path, repo_type="dataset", revision=wanted.revision)
        opened = parquet.ParquetFile(file)
        return opened.metadata.num_rows, opened.iter_batches()
    except Exception as error:  # noqa: BLE001 - the hub's client, the file system and pyarrow have no class in common
        raise FlashRLError(
            f"{wanted.hub_id}: {file} was not read: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300].rstrip('.')}. Remedy: where there is a network, `hf download "
            f"{wanted.hub_id} --repo-type dataset --revision {wanted.revision} --local-dir FOLDER`; then here "
            f"--source FOLDER, in which {wanted.split}.jsonl does as well."
        ) from error


def prepare(count: int, batches: Iterable[RecordBatch], wanted: Published) -> tuple[list[Row], str]:
    """Make verl's rows of those that stay, in their order. Copies of a prompt share their `index`.

    Args:
        count, batches: as `read` returns them.
        wanted: what it is.

    Returns:
        The rows, and in words what was made of how many.

    Raises:
        FlashRLError: a row is not of this data set.
    """
    from tqdm import tqdm

    made: list[Row] = []
    prompts: dict[tuple, dict[str, Row]] = {}  # by prompt, then by answer: equal rows are one object
    rows = (row for batch in batches for row in batch.to_pylist())
    for row in tqdm(rows, f"reading {wanted.hub_id}", count, leave=False, disable=None):
        try:
            example = wanted.convert(row)
        except (KeyError, TypeError, ValueError) as error:
            raise FlashRLError(
                f"{wanted.hub_id}: a row of the {wanted.split} split is not of this data set ({error!r}); it has "
                f"{', '.join(row)}. Remedy: give --source the folder of this data set"
            ) from error
        prompt = tuple((message["role"], message["content"]) for message in example["prompt"])
        made.append(prompts.setdefault(prompt, {}).setdefault(example["reward_model"]["ground_truth"], example))
    kept = [examples for examples in prompts.values() if wanted.keep_duplicates or len(examples) == 1]
    for index, examples in enumerate(kept):
        for example in examples.values():
            example["extra_info"] = {"split": wanted.split, "index": index}
    if not wanted.keep_duplicates:
        made = [example for examples in kept for example in examples.values()]
    words = f"{len(made):,} rows, {len(kept):,} prompts, from {count:,} rows"
    if several := len(prompts) - len(kept):
        words += f"; {several:,} prompts with several answers are left out"
    return made, words


# ---- the command ----


def data(
    name: Annotated[Name, typer.Argument(help="The data set.", show_default=False)],
    source: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="A folder with the files as published, or <split>.jsonl; else the hub."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the parquet files.")] = Path("data"),
) -> None:
    """Prepare a data set for verl, as parquet.

    Of dapo-math-17k each prompt stays once, and none with several answers. gsm8k asks for the answer after ####,
    gsm8k-boxed in \\boxed{}, as Qwen2.5-Coder gives it; the reward looks for what the prompt asks.
    """
    import pyarrow
    from pyarrow import parquet

    made = []  # all splits are read and checked before the first is written
    for wanted in CATALOG[name.value]:
        path = output.expanduser() / wanted.output
        if source is not None and path.resolve() == (source / wanted.path).resolve():
            raise ConfigError(f"{path} is the source and the output. Choose another --output.")
        made.append((path, *prepare(*read(wanted, source), wanted)))
    output.expanduser().mkdir(parents=True, exist_ok=True)
    for path, rows, words in made:
        content = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.Table.from_pylist(rows), content, compression="zstd")
        write_atomically(path, content.getvalue())
        typer.echo(f"{path}: {words}")
