# SPDX-License-Identifier: Apache-2.0
"""One row: what is published becomes an example or an error that says what is wrong with it; an example becomes verl's
row."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.legacy_learning.tools.data import answers

VERL_COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
GSM8K_COLUMNS = ("question", "answer")

GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""What verl asks after the question, and what its reward looks for (examples/data_preprocess/gsm8k.py at 63b2ae3)."""

MATH_DAPO_WORDS = "math_dapo, or a name that starts with aime: by it verl picks the reward"
ROLES = ("system", "user", "assistant")


def scored_by_math_dapo(data_source: str) -> bool:
    """Whether verl's `default_compute_score` (0.9.1) hands it to `math_dapo`; two more names are for other data
    sets."""
    return data_source == "math_dapo" or data_source.startswith("aime")


def is_gsm8k(data_source: str) -> bool:
    """Whether verl's `default_compute_score` (0.9.1) hands it to `gsm8k`."""
    return data_source == GSM8K_SOURCE


@dataclass(frozen=True)
class Rules:
    """What a data set's rows have to fulfil."""

    answer: Callable[[str], str | None]
    """The one spelling of an answer, None for what is no answer."""
    answer_words: str
    data_source: Callable[[str], bool]
    data_source_words: str


@dataclass(frozen=True)
class Example:
    """A row that was checked."""

    data_source: str
    messages: tuple[tuple[str, str], ...]
    """Role and content."""
    ability: str
    style: str
    answer: str
    source_id: str
    """Its index in the published data."""
    respelled: bool
    """Whether the published answer is the same number in another spelling."""

    def key(self) -> bytes:
        """16 bytes that are equal for equal prompts."""
        digest = hashlib.blake2b(digest_size=16)
        for role, content in self.messages:
            digest.update(f"{role}\0{content}\0".encode())
        return digest.digest()

    def verl_row(self, split: str, index: int) -> dict[str, Any]:
        """The row for verl. All data sets get the same columns: verl can train on several files only if their columns
        agree.

        Args:
            split: `train` or `test`.
            index: the prompt's number: copies of a prompt share it.
        """
        return {
            "data_source": self.data_source,
            "prompt": [{"role": role, "content": content} for role, content in self.messages],
            "ability": self.ability,
            "reward_model": {"style": self.style, "ground_truth": self.answer},
            "extra_info": {"split": split, "index": index, "source_id": self.source_id},
        }


class BadRow(Exception):
    """A row is not what it has to be.

    Args:
        column: dotted, such as `reward_model.ground_truth`.
        value: what is there.
        expected: what has to be there, in words.
    """

    def __init__(self, column: str, value: object, expected: str):
        super().__init__(f"{column} is {shortened(value)}; expected {expected}")


def shortened(value: object) -> str:
    """A value as an error shows it: one line of at most about 80 characters."""
    if value is None:
        return "null"
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


# ---- from published rows ----


def from_verl_row(row: object, number: int, rules: Rules) -> Example:
    """Check a row that is published in verl's format.

    Args:
        row: the columns of `VERL_COLUMNS`.
        number: of the row, from 0.
        rules: of the data set.

    Raises:
        BadRow: for the first thing that is wrong.
    """
    row = _object("row", row)
    data_source = _data_source(row, rules)
    messages = _messages(row.get("prompt"))
    ability = _text("ability", row.get("ability"))
    reward = _object("reward_model", row.get("reward_model"))
    style = _text("reward_model.style", reward.get("style"))
    published = _text("reward_model.ground_truth", reward.get("ground_truth"))
    answer = rules.answer(published)
    if answer is None:
        raise BadRow("reward_model.ground_truth", published, rules.answer_words)
    index = _object("extra_info", row.get("extra_info")).get("index")
    if isinstance(index, int) and not isinstance(index, bool):
        index = str(index)
    source_id = _text("extra_info.index", index)
    return Example(data_source, messages, ability, style, answer, source_id, answer != published)


def from_gsm8k_row(row: object, number: int, rules: Rules) -> Example:
    """Check a row of GSM8K, and ask as verl's example does.

    Args:
        row: `question`, and `answer`: a solution that ends in "#### " and a number.
        number: of the row, from 0.
        rules: of the data set.

    Raises:
        BadRow: for the first thing that is wrong.
    """
    row = _object("row", row)
    question = _text("question", row.get("question"))
    solution = _text("answer", row.get("answer"))
    answer = answers.gsm8k_final(solution)
    if answer is None:
        # The end is what is wrong with it.
        raise BadRow("answer", solution[-80:], 'a solution that ends in "#### " and a number')
    messages = (("user", f"{question} {GSM8K_INSTRUCTION}"),)
    return Example(GSM8K_SOURCE, messages, "math", "rule", answer, str(number), False)


# ---- prepared rows ----


def from_prepared_row(row: dict[str, Any], split: str, rules: Rules) -> tuple[Example, int]:
    """Check a row that was prepared.

    Args:
        row: as `Example.verl_row` makes it.
        split: of the file.
        rules: of the data set.

    Returns:
        The example and its index.

    Raises:
        BadRow: for the first thing that is wrong.
    """
    extra = _object("extra_info", row.get("extra_info"))
    if extra.get("split") != split:
        raise BadRow("extra_info.split", extra.get("split"), split)
    index = extra.get("index")
    if not isinstance(index, int) or index < 0:
        raise BadRow("extra_info.index", index, "a number from 0")
    # What is left is published rows' business, with the source's index under another name.
    example = from_verl_row({**row, "extra_info": {"index": extra.get("source_id")}}, index, rules)
    if example.respelled:
        raise BadRow(
            "reward_model.ground_truth", row["reward_model"]["ground_truth"], f"{example.answer!r}, as verl compares it"
        )
    return example, index


# ---- values ----


def _object(column: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRow(column, value, "an object with named fields")
    return value


def _text(column: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRow(column, value, "text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, or bytes that were no UTF-8: parquet cannot hold them
        raise BadRow(column, value, "valid Unicode") from None
    return value


def _data_source(row: dict[str, Any], rules: Rules) -> str:
    value = _text("data_source", row.get("data_source"))
    if not rules.data_source(value):
        raise BadRow("data_source", value, rules.data_source_words)
    return value


def _messages(prompt: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(prompt, list) or not prompt:
        raise BadRow("prompt", prompt, "a list of messages {role, content} that is not empty")
    messages = []
    for position, message in enumerate(prompt):
        column = f"prompt[{position}]"
        message = _object(column, message)
        role = message.get("role")
        if role not in ROLES or (role == "system" and position > 0):
            raise BadRow(f"{column}.role", role, "user or assistant, or system for the first message")
        messages.append((role, _text(f"{column}.content", message.get("content"))))
    if messages[-1][0] != "user":
        raise BadRow(
            f"prompt[{len(messages) - 1}].role", messages[-1][0], "user in the last message, which the model answers"
        )
    return tuple(messages)
