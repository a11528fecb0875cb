# SPDX-License-Identifier: Apache-2.0
"""A row, a file or a request that cannot be used is named with what was expected, and nothing is written."""

import pytest
from published_data import (
    aime_rows,
    dapo_rows,
    gsm8k_rows,
    make,
    math_row,
    quiet,
    refused,
    write_lines,
    write_parquet,
)

from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.data.catalog import Name, Split
from flashrl_verl.tools.data.prepare import check

DAPO, AIME, GSM8K = Name.DAPO_MATH_17K, Name.AIME_2024, Name.GSM8K

GOOD = math_row("What is 1 + 1?", "2", "id-good")


def changed(**columns):
    return {**GOOD, **columns}


BAD_MATH = {
    "an empty prompt": (changed(prompt=[]), "prompt is []"),
    "no prompt": (changed(prompt=None), "prompt is null"),
    "a prompt that is text": (changed(prompt="What?"), "prompt is 'What?'"),
    "a blank question": (changed(prompt=[{"role": "user", "content": " \n"}]), "prompt[0].content is ' \\n'"),
    "a question that is a number": (changed(prompt=[{"role": "user", "content": 7}]), "prompt[0].content is 7"),
    "a role that is none": (changed(prompt=[{"role": "human", "content": "What?"}]), "prompt[0].role is 'human'"),
    "a role that is none, before a question": (
        changed(prompt=[{"role": "human", "content": "a"}, {"role": "user", "content": "b"}]),
        "prompt[0].role is 'human'; expected user or assistant",
    ),
    "nobody asks": (
        changed(prompt=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
        "prompt[1].role is 'assistant'; expected user in the last message",
    ),
    "a system prompt that is not first": (
        changed(prompt=[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]),
        "prompt[1].role is 'system'",
    ),
    "a message that is text": (changed(prompt=["What?"]), "prompt[0] is 'What?'"),
    "no reward": (changed(reward_model=None), "reward_model is null"),
    "no ground truth": (changed(reward_model={"style": "rule"}), "reward_model.ground_truth is null"),
    "a ground truth that is a number": (
        changed(reward_model={"style": "rule", "ground_truth": 2}),
        "reward_model.ground_truth is 2; expected text",
    ),
    "a formula": (
        changed(reward_model={"style": "rule", "ground_truth": "\\frac{1}{2}"}),
        "reward_model.ground_truth is '\\\\frac{1}{2}'; expected an integer",
    ),
    "no style": (changed(reward_model={"style": "", "ground_truth": "2"}), "reward_model.style is ''"),
    "another reward": (changed(data_source="openai/gsm8k"), "data_source is 'openai/gsm8k'; expected math_dapo"),
    "no data source": (changed(data_source=None), "data_source is null"),
    "no ability": (changed(ability=None), "ability is null"),
    "no index": (changed(extra_info={"index": None}), "extra_info.index is null"),
    "an index of two prompts": (
        math_row("Another problem", "2", "id-good"),
        "extra_info.index is 'id-good'; expected one of its own: row 0 asks something else",
    ),
    "half a surrogate": (changed(ability="\ud83d"), "ability is '\\ud83d'; expected valid Unicode"),
    "no object": ([1, 2], "row is [1, 2]; expected an object"),
}


@pytest.mark.parametrize("case", BAD_MATH)
def test_a_bad_row_is_named_with_its_column_value_and_what_was_expected(tmp_path, case):
    row, said = BAD_MATH[case]
    source = write_lines(tmp_path / "train.jsonl", [GOOD, row])
    message = refused(DAPO, source, tmp_path / "out")
    assert f"1 of 2 rows of {source} cannot be used (rows are counted from 0)" in message
    assert f"\n  row 1: {said}" in message and "--drop-invalid" in message


@pytest.mark.parametrize("answer", ["1000", "-1", "12.5", "twelve", " "])
def test_an_answer_that_no_aime_has_is_refused(tmp_path, answer):
    rows = [*aime_rows(), math_row("Find it.", answer, 99)]
    message = refused(AIME, write_parquet(tmp_path / "a.parquet", rows), tmp_path / "out")
    assert f"row 12: reward_model.ground_truth is {answer!r}; expected" in message


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"question": "How many?", "answer": "It is 5."},
            "answer is 'It is 5.'; expected a solution that ends in \"#### \"",
        ),
        ({"question": "How many?", "answer": "It is.\n#### five"}, "answer is 'It is.\\n#### five'"),
        ({"question": "How many?", "answer": "#### 5."}, "answer is '#### 5.'"),
        ({"question": "", "answer": "#### 5"}, "question is ''"),
        ({"question": "How many?", "answer": None}, "answer is null"),
    ],
)
def test_a_solution_without_its_number_is_refused_before_either_split_is_written(tmp_path, row, said):
    write_lines(tmp_path / "gsm8k" / "train.jsonl", gsm8k_rows())
    write_lines(tmp_path / "gsm8k" / "test.jsonl", [*gsm8k_rows(), row])
    message = refused(GSM8K, tmp_path / "gsm8k", tmp_path / "out")
    assert f"row 5: {said}" in message and "test.jsonl" in message


def test_many_bad_rows_are_counted_and_their_values_shortened(tmp_path):
    bad = [math_row(f"Problem {n}", "x" * 10_000, f"id-{n}") for n in range(25)]
    message = refused(DAPO, write_parquet(tmp_path / "d.parquet", [GOOD, *bad]), tmp_path / "out")
    assert (
        "25 of 26 rows" in message and "row 10: " in message and "row 11: " not in message and "and 15 more" in message
    )
    assert len(message) < 3000


def test_a_user_can_go_on_without_the_bad_rows_and_the_record_says_so(tmp_path):
    clash = math_row("Another problem", "2", "id-good")
    rows = [GOOD, changed(prompt=[]), *dapo_rows(), clash]
    for keep, count in ((False, 7), (True, 19)):
        [file] = make(
            DAPO, write_lines(tmp_path / "d.jsonl", rows), tmp_path / str(keep), drop_invalid=True, keep_duplicates=keep
        )
        assert file.record["output"]["rows"] == count and file.record["findings"]["invalid"] == 2
        assert file.record["findings"]["invalid_first"][0].startswith("row 1: prompt is []")
        check(file.path, quiet)


def test_a_source_of_bad_rows_only_is_refused_whatever_is_asked(tmp_path):
    source = write_lines(tmp_path / "d.jsonl", [changed(prompt=[])])
    assert "none of its 1 rows is left" in refused(DAPO, source, tmp_path / "out", drop_invalid=True)


# ---- bad files and requests ----


def test_a_file_that_is_no_parquet_file_is_one_error(tmp_path):
    (tmp_path / "d.parquet").write_bytes(b"not found")
    assert "is not a readable parquet file" in refused(DAPO, tmp_path / "d.parquet", tmp_path / "out")


def test_a_truncated_parquet_file_is_one_error(tmp_path):
    source = write_parquet(tmp_path / "d.parquet", dapo_rows(200, 3))
    data = source.read_bytes()
    source.write_bytes(data[:200] + bytes(len(data) - 1200) + data[-1000:])  # the footer is whole
    assert str(source) in refused(DAPO, source, tmp_path / "out")


def test_an_empty_file_is_one_error(tmp_path):
    (tmp_path / "d.jsonl").write_text("")
    assert "holds no rows" in refused(DAPO, tmp_path / "d.jsonl", tmp_path / "out")


def test_a_line_that_is_no_json_is_named(tmp_path):
    source = write_lines(tmp_path / "d.jsonl", [GOOD])
    source.write_text(source.read_text() + "{'prompt': \n")
    assert "row 1: row is \"{'prompt': \"; expected an object" in refused(DAPO, source, tmp_path / "out")


def test_missing_columns_are_named_beside_those_that_are_there(tmp_path):
    source = write_parquet(tmp_path / "d.parquet", [{"prompt": "What?", "solution": "2"}])
    message = refused(DAPO, source, tmp_path / "out")
    assert "no column data_source, ability, reward_model, extra_info: its columns are prompt, solution" in message


def test_a_folder_without_the_file_says_what_was_looked_for(tmp_path):
    (tmp_path / "empty").mkdir()
    message = refused(GSM8K, tmp_path / "empty", tmp_path / "out")
    assert "main/train-00000-of-00001.parquet, train-00000-of-00001.parquet, train.parquet, train.jsonl" in message


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path):
    for source in (tmp_path / "no.parquet", "no/such.parquet", "./no/such", "folder/with/three"):
        assert "is not on this machine" in refused(DAPO, source, tmp_path / "out")


def test_one_file_for_two_splits_needs_to_be_told_which(tmp_path):
    source = write_parquet(tmp_path / "some.parquet", gsm8k_rows())
    with pytest.raises(ConfigError, match="--split train or --split test"):
        make(GSM8K, source, tmp_path / "out")
    [file] = make(GSM8K, source, tmp_path / "out", split=Split.TEST)
    assert file.path.name == "gsm8k-test.parquet"


def test_a_split_that_is_not_published_and_a_revision_of_a_local_file_are_refused(tmp_path):
    source = write_parquet(tmp_path / "d.parquet", dapo_rows())
    with pytest.raises(ConfigError, match="dapo-math-17k has train only"):
        make(DAPO, source, tmp_path / "out", split=Split.TEST)
    with pytest.raises(ConfigError, match="--revision main is for repositories of the hub"):
        make(DAPO, source, tmp_path / "out", revision="main")
