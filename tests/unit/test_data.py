# SPDX-License-Identifier: Apache-2.0
"""Published rows become what verl reads and scores; copies of a prompt stay or go."""

import random
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from published_data import (
    aime_rows,
    dapo_rows,
    gsm8k_folder,
    gsm8k_rows,
    make,
    math_row,
    quiet,
    write_parquet,
)
from pyarrow import parquet

from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.data.catalog import CATALOG, Name
from flashrl_verl.tools.data.prepare import Request, check, prepare
from flashrl_verl.tools.data.source import BATCH
from flashrl_verl.tools.data.verl_file import schema
from flashrl_verl.tools.recipe_process import compose
from flashrl_verl.validation import check_paths

DAPO, AIME, GSM8K = Name.DAPO_MATH_17K, Name.AIME_2024, Name.GSM8K


# ---- what verl sees ----


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """All data sets, prepared from local sources; by name and split."""
    folder = tmp_path_factory.mktemp("prepared")
    sources = {
        DAPO: write_parquet(folder / "dapo.parquet", dapo_rows()),
        AIME: write_parquet(folder / "aime.parquet", aime_rows()),
        GSM8K: gsm8k_folder(folder / "gsm8k"),
    }
    made = [file for name, source in sources.items() for file in make(name, source, folder / "data")]
    return {(file.record["dataset"], file.record["split"]): file.path for file in made}


@pytest.fixture
def verl_dataset(tmp_path, monkeypatch):
    """verl's own dataset of one or several files."""
    import datasets
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from flashrl_verl.quickstart.tokenizer import build_tokenizer

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config = {"cache_dir": str(tmp_path), "max_prompt_length": 4096, "filter_overlong_prompts_workers": None}
    return lambda *files: RLHFDataset(list(map(str, files)), build_tokenizer(), OmegaConf.create(config))


def solution(name: str, answer: str) -> str:
    return f"So it is.\n#### {answer}" if name == "gsm8k" else f"So it is.\nAnswer: {answer}"


@pytest.mark.parametrize(
    ("name", "split", "rows", "prompts"),
    [("dapo-math-17k", "train", 6, 6), ("aime-2024", "test", 12, 3), ("gsm8k", "train", 5, 5), ("gsm8k", "test", 4, 4)],
)
def test_verl_loads_the_file_and_its_reward_knows_right_from_wrong(prepared, verl_dataset, name, split, rows, prompts):
    from verl.utils.reward_score import default_compute_score

    dataset = verl_dataset(prepared[name, split])
    assert len(dataset) == rows  # none is filtered out as too long
    indices = set()
    for row in (dataset[i] for i in range(rows)):
        truth, asked = row["reward_model"]["ground_truth"], row["raw_prompt"]
        assert [message["role"] for message in asked] == ["user"] and asked[0]["content"]
        assert row["index"] == row["extra_info"]["index"] and row["extra_info"]["split"] == split
        indices.add(row["index"])
        said = solution(name, truth), solution(name, str(int(truth) + 1))
        score = [default_compute_score(row["data_source"], text, truth) for text in said]
        acc = [value["acc"] if isinstance(value, dict) else value for value in score]
        assert acc == [1, 0], (truth, score)
    assert indices == set(range(prompts))


def test_verl_trains_on_several_prepared_files_at_once(prepared, verl_dataset):
    files = [prepared["dapo-math-17k", "train"], prepared["gsm8k", "train"], prepared["aime-2024", "test"]]
    assert len(verl_dataset(*files)) == 6 + 5 + 12


def test_gsm8k_asks_as_verls_example_does_and_takes_the_commas_from_the_answer(prepared):
    [published, *_], [row, *_] = gsm8k_rows(5, seed=1), parquet.read_table(prepared["gsm8k", "train"]).to_pylist()
    asked = published["question"] + ' Let\'s think step by step and output the final answer after "####".'
    assert row["prompt"] == [{"role": "user", "content": asked}]
    assert row["reward_model"] == {
        "style": "rule",
        "ground_truth": published["answer"].split("#### ")[1].replace(",", ""),
    }
    assert "," in published["answer"].split("#### ")[1]


def test_published_prompts_styles_and_abilities_stay_as_they_are(prepared):
    written = parquet.read_table(prepared["dapo-math-17k", "train"]).to_pylist()
    for published, row in zip(dapo_rows(copies=1), written, strict=True):
        assert {**row, "extra_info": None} == {**published, "extra_info": None}
        assert row["extra_info"]["source_id"] == published["extra_info"]["index"]


def test_leading_zeros_go_because_verl_compares_text(prepared, tmp_path):
    from verl.utils.reward_score import default_compute_score

    truths = {
        row["reward_model"]["ground_truth"] for row in parquet.read_table(prepared["aime-2024", "test"]).to_pylist()
    }
    assert truths == {"31", "32", "33"} and aime_rows()[0]["reward_model"]["ground_truth"] == "031"
    assert not default_compute_score("math_dapo", "Answer: 31", "031")["acc"]  # when this fails, they may stay
    [file] = make(AIME, write_parquet(tmp_path / "a.parquet", aime_rows()), tmp_path / "out")
    assert file.record["findings"]["respelled_answers"] == 12


def test_the_experiments_look_for_the_names_that_are_written():
    written = {f"data/{file.output}.parquet" for data_set in CATALOG.values() for file in data_set.files}
    for script in (Path(__file__).parents[2] / "recipe" / "flashrl").glob("run_*.sh"):
        data = compose([f"experiment={script.stem.removeprefix('run_')}"]).data
        assert {data.train_files, data.val_files} <= written, script.name


def test_a_run_without_its_data_says_how_to_make_them(tmp_path):
    cfg = compose(["experiment=dapo_qwen2.5_32b_int8"])
    with pytest.raises(ConfigError, match="data.train_files=.*data.val_files=.*`flashrl data --help`"):
        check_paths(cfg, root=tmp_path)


# ---- copies ----


@pytest.mark.parametrize(("keep", "rows"), [(None, 6), (False, 6), (True, 18)])
def test_copies_of_a_training_prompt_go_unless_they_are_wanted(tmp_path, keep, rows):
    source = write_parquet(tmp_path / "d.parquet", dapo_rows(6, copies=3))
    [file] = make(DAPO, source, tmp_path / "out", keep_duplicates=keep)
    table = parquet.read_table(file.path)
    assert table.num_rows == file.record["output"]["rows"] == rows and table.schema.equals(schema())
    assert file.record["output"]["prompts"] == 6 and file.record["output"]["copies_in_source"] == [3, 3]
    assert [row["index"] for row in table["extra_info"].to_pylist()] == list(range(6)) * (rows // 6)


@pytest.mark.parametrize(("keep", "rows"), [(None, 12), (True, 12), (False, 3)])
def test_copies_of_a_validation_problem_stay_unless_they_are_not_wanted(tmp_path, keep, rows):
    [file] = make(AIME, write_parquet(tmp_path / "a.parquet", aime_rows(3, 4)), tmp_path / "out", keep_duplicates=keep)
    assert parquet.read_metadata(file.path).num_rows == rows


@pytest.mark.parametrize(("keep", "rows"), [(False, 5), (True, 14)])
def test_a_prompt_with_two_answers_goes_with_the_copies_and_is_counted(tmp_path, keep, rows):
    published = dapo_rows(6, copies=2)
    other = {
        **published[2],
        "reward_model": {**published[2]["reward_model"], "ground_truth": "31415"},
        "extra_info": {"index": "x"},
    }
    [file] = make(
        DAPO, write_parquet(tmp_path / "d.parquet", [*published, other, other]), tmp_path / "out", keep_duplicates=keep
    )
    truth = published[2]["reward_model"]["ground_truth"]
    assert file.record["findings"]["prompts_with_several_answers"] == [
        {"first_row": 2, "answers": [truth, "31415"], "rows": 4}
    ]
    left = parquet.read_table(file.path).to_pylist()
    assert len(left) == rows and [row["extra_info"]["index"] for row in left[:5]] == list(range(5))
    assert ("31415" in [row["reward_model"]["ground_truth"] for row in left]) == keep
    check(file.path, quiet)


def test_a_source_of_many_batches_is_read_in_its_order_and_the_prompts_that_come_late_are_found(tmp_path):
    rows = [math_row(f"Problem {number}", str(number), f"id-{number}") for number in range(BATCH + 50)]
    random.Random(0).shuffle(rows)
    source = tmp_path / "d.parquet"
    write_parquet(source, rows[:100] * 2 + rows, group=5000)
    seen = []
    [file] = prepare(
        Request(name=DAPO, source=str(source), output=tmp_path / "out"), lambda *progress: seen.append(progress)
    )
    truths = [row["ground_truth"] for row in parquet.read_table(file.path)["reward_model"].to_pylist()]
    assert truths == [row["reward_model"]["ground_truth"] for row in rows]
    total = BATCH + 250
    assert ("checking d.parquet", total, total) in seen and seen[-1] == ("writing", total, total)
