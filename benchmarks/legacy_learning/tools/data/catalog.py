# SPDX-License-Identifier: Apache-2.0
"""The data sets that can be prepared: where each is published, and what its rows must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from benchmarks.legacy_learning.tools.data import answers, rows


class Name(str, Enum):
    """What users call a data set."""

    DAPO_MATH_17K = "dapo-math-17k"
    AIME_2024 = "aime-2024"
    GSM8K = "gsm8k"


class Split(str, Enum):
    """What a file is for."""

    TRAIN = "train"
    TEST = "test"


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """One file of a data set's repository, and the file that is made of it."""

    split: Split
    path: str
    """In the repository."""
    sha256: str
    """Of the published file at the data set's `revision`, in hexadecimal."""
    output: str
    """Name of the prepared file, without its ending: the names that the experiments' `data.train_files` have."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A published data set."""

    name: Name
    hub_id: str
    """Repository on the Hugging Face hub, of type dataset."""
    revision: str
    """The commit that is fetched when none is named: a branch could change between two runs that should train on the
    same."""
    files: tuple[PublishedFile, ...]
    columns: tuple[str, ...]
    """Columns of the published files that are read."""
    read: Callable[[object, int, rows.Rules], rows.Example]
    """What `example` does, with `rules`."""
    rules: rows.Rules
    keep_duplicates: bool
    """Whether copies of a prompt stay, unless the user says otherwise."""

    def example(self, row: object, number: int) -> rows.Example:
        """Make an example of a published row and its number, from 0.

        Raises:
            rows.BadRow: for the first thing that is wrong.
        """
        return self.read(row, number, self.rules)

    def file(self, split: Split) -> PublishedFile:
        """The file of a split; KeyError where the data set has none."""
        return {file.split: file for file in self.files}[split]


# Commits and checksums are as several public repositories that pin these files give them: there was no hub to ask.
_ALL = (
    # 1,791,700 rows: 17,917 rows, 100 times each, of 17,398 different prompts, 7 of them with two different answers
    # (https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k/discussions/3, verl-project/verl issue 3065).
    # verl's script trains on the file as it is: an epoch of it is 100 epochs of the prompts.
    DataSet(
        name=Name.DAPO_MATH_17K,
        hub_id="BytedTsinghua-SIA/DAPO-Math-17k",
        revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
        files=(
            PublishedFile(
                split=Split.TRAIN,
                path="data/dapo-math-17k.parquet",
                sha256="534375d6bb8630d22ab46a56e11f2ffec1d288d8f7d04099bc82d68948705941",
                output="dapo-math-17k",
            ),
        ),
        columns=rows.VERL_COLUMNS,
        read=rows.from_verl_row,
        rules=rows.Rules(answers.integer, "an integer in digits", rows.scored_by_math_dapo, rows.MATH_DAPO_WORDS),
        keep_duplicates=False,
    ),
    # 960 rows: 30 problems, 32 times each, so that one sample a row is avg@32.
    DataSet(
        name=Name.AIME_2024,
        hub_id="BytedTsinghua-SIA/AIME-2024",
        revision="aa49075e24ad594b79fdf0bdcefa735c2181be67",
        files=(
            PublishedFile(
                split=Split.TEST,
                path="data/aime-2024.parquet",
                sha256="12154e38a716d12db5731f9a022ae69a610c4f7d0e0dcc04e902887a686877e7",
                output="aime-2024",
            ),
        ),
        columns=rows.VERL_COLUMNS,
        read=rows.from_verl_row,
        rules=rows.Rules(answers.aime, "an integer from 0 to 999", rows.scored_by_math_dapo, rows.MATH_DAPO_WORDS),
        keep_duplicates=True,
    ),
    DataSet(
        name=Name.GSM8K,
        hub_id="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        files=(
            PublishedFile(
                split=Split.TRAIN,
                path="main/train-00000-of-00001.parquet",
                sha256="ea82612ea9582142387730c793eb67d3b12849002bc0b7fa6f8efafa7351419d",
                output="gsm8k-train",
            ),
            PublishedFile(
                split=Split.TEST,
                path="main/test-00000-of-00001.parquet",
                sha256="ee7b8da9e381df27b9e3f7758a159ab2bdaa4dbaa910546cbbc47e0cb44e4f59",
                output="gsm8k-test",
            ),
        ),
        columns=rows.GSM8K_COLUMNS,
        read=rows.from_gsm8k_row,
        rules=rows.Rules(answers.number, "a number", rows.is_gsm8k, rows.GSM8K_SOURCE),
        keep_duplicates=True,
    ),
)

CATALOG = {data_set.name: data_set for data_set in _ALL}
