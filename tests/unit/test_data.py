# SPDX-License-Identifier: Apache-2.0
"""`flashrl data`: what verl's dataset and rewards make of the files, copies of a prompt, wrong rows, the hub."""

import json
import random
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError, DataError
from flashrl_verl.tools.data import CATALOG

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def math_row(question: str, answer: object = "2", **columns: object) -> dict:
    """As DAPO-Math-17k and AIME-2024 are published."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve it. The last line is Answer: $Answer.\n\n{question}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id of {question}"},
        **columns,
    }


def gsm8k_row(number: int) -> dict:
    return {"question": f"How many is {number}?", "answer": f"It is <<{number}={number}>>.\n#### {number:,}"}


def save(path: Path, rows: list) -> Path:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def read(path: Path) -> list[dict]:
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


def data(*words: object) -> str:
    """`flashrl data`: what it says, or the error that it raises."""
    result = CliRunner().invoke(app, ["data", *map(str, words)])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def prepared(tmp_path):
    """The folder with a file of every data set."""
    save(tmp_path / "dapo.jsonl", [math_row(f"{n} + 1", str(n + 1)) for n in range(6)] * 3)
    save(tmp_path / "aime.parquet", [math_row(f"{n} + 30", f"{n + 30:03}") for n in range(3)] * 4)
    save(tmp_path / "gsm8k" / "main" / "train-00000-of-00001.parquet", [gsm8k_row(n) for n in range(998, 1003)])
    save(tmp_path / "gsm8k" / "test.jsonl", [gsm8k_row(n) for n in range(4)])
    for name, source in (
        ("dapo-math-17k", "dapo.jsonl"),
        ("aime-2024", "aime.parquet"),
        ("gsm8k", "gsm8k"),
        ("gsm8k-boxed", "gsm8k"),
    ):
        data(name, "--source", tmp_path / source, "--output", tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", chat_template=template)


@pytest.fixture
def verl_dataset(tmp_path, tokenizer):
    """verl's own dataset of files."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    def load(*files: Path):
        config = {"cache_dir": str(tmp_path), "max_prompt_length": 100, "filter_overlong_prompts_workers": None}
        return RLHFDataset(list(map(str, files)), tokenizer, OmegaConf.create(config))

    return load


# ---- what verl sees ----


@pytest.mark.parametrize(
    ("file", "rows", "prompts"),
    [("dapo-math-17k", 6, 6), ("aime-2024", 12, 3), ("gsm8k-train", 5, 5), ("gsm8k-test", 4, 4)]
    + [("gsm8k-boxed-test", 4, 4)],
)
def test_verl_loads_the_file_and_its_reward_knows_right_from_wrong(prepared, verl_dataset, file, rows, prompts):
    from verl.utils.reward_score import default_compute_score

    dataset = verl_dataset(prepared / f"{file}.parquet")
    assert len(dataset) == rows and {row["index"] for row in dataset} == set(range(prompts))
    for row in dataset:
        truth, [asked] = row["reward_model"]["ground_truth"], row["raw_prompt"]
        numbers = [int(number) for number in re.findall(r"\d+", asked["content"].split("Let's")[0])]
        assert int(truth) == sum(numbers) and asked["role"] == "user"
        form = r"\boxed{{{}}}" if "boxed" in file else "#### {}" if "gsm8k" in file else "Answer: {}"
        said = [f"So it is.\n{form.format(answer)}" for answer in (truth, int(truth) + 1)]
        assert "gsm8k" not in file or form.split("{")[0].strip() in asked["content"]
        scores = [default_compute_score(row["data_source"], text, truth) for text in said]
        assert [score["acc"] if isinstance(score, dict) else score for score in scores] == [1, 0]


def test_verl_mixes_the_files(prepared, verl_dataset):
    assert len(verl_dataset(*prepared.glob("*.parquet"))) == 6 + 12 + 2 * (5 + 4)


def test_the_experiments_look_for_the_files_that_are_written():
    experiments = (ROOT / "flashrl_verl" / "configs" / "experiment").glob("*.yaml")
    named = {name for path in experiments for name in re.findall(r"files: data/(\S+)", path.read_text())}
    assert named == {wanted.output for splits in CATALOG.values() for wanted in splits}


# ---- copies of a prompt ----


@pytest.mark.parametrize("seed", range(3))
def test_copies_go_and_so_do_prompts_with_several_answers(tmp_path, seed):
    rng = random.Random(seed)
    asked = [(rng.randrange(40), rng.choice(["1", "1", "1", "01", "2"])) for _ in range(100)]
    source = save(tmp_path / "d.parquet", [math_row(f"Problem {q}.", answer) for q, answer in asked])
    answers = {q: {int(answer) for other, answer in asked if other == q} for q, _ in asked}
    order = [q for q in dict.fromkeys(q for q, _ in asked) if len(answers[q]) == 1]

    def of(row):
        return int(row["prompt"][0]["content"].split()[-1][:-1]), int(row["reward_model"]["ground_truth"])

    said = data("dapo-math-17k", "--source", source, "--output", tmp_path)
    rows = read(tmp_path / "dapo-math-17k.parquet")
    assert [of(row) for row in rows] == [(q, *answers[q]) for q in order]
    assert [row["extra_info"] for row in rows] == [{"split": "train", "index": n} for n in range(len(order))]
    several = sum(q not in order for q, _ in asked)
    assert f"{len(order)} rows, {len(order)} prompts, from 100 rows of {source}\n" in said
    assert f"dropped: {100 - several - len(order)} copies" in said and f"dropped: {several} rows, because" in said


# ---- what cannot be used ----


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("aime-2024", math_row("", r"\frac{1}{2}")),
        ("aime-2024", math_row("", reward_model={"style": "rule"})),
        ("aime-2024", math_row("", prompt="What?")),
        ("gsm8k", {"question": "Why?", "answer": "#### five"}),
        ("gsm8k", {"question": "Why?", "answer": "#### ,."}),
    ],
)
def test_a_row_that_is_not_as_published_is_named_and_no_split_is_written(tmp_path, name, row):
    good = gsm8k_row(1) if name == "gsm8k" else math_row("Good.")
    for split in ("train", "test"):
        save(tmp_path / "in" / f"{split}.jsonl", [good, row] if split == "test" else [good])
    with pytest.raises(DataError, match=r"row 1 of .*test.jsonl, from 0, is not as published"):
        data(name, "--source", tmp_path / "in", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("d.parquet", "not found", "d.parquet was not loaded: .*corrupted or this is not a parquet file"),
        ("d.jsonl", json.dumps(math_row("Good.")) + "\n{'prompt': \n", "d.jsonl was not loaded: .* row 1"),
        ("d.jsonl", "", "d.jsonl was not loaded: .*no rows"),
        (
            "d.jsonl",
            '{"prompt": "a", "b": 1}',
            "no column data_source, ability, reward_model: its columns are prompt, b",
        ),
        ("other/train.csv", "a", "has no train file: none of data/dapo-math-17k.parquet, .*train.jsonl"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_error(tmp_path, file, content, said):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(DataError, match=said):
        data("dapo-math-17k", "--source", path.parent if "/" in file else path, "--output", tmp_path / "out")


def test_a_request_that_cannot_be_met_is_refused(prepared):
    gsm8k = prepared.parent / "gsm8k"
    for words, said in {
        ("gsm8k", "--source", gsm8k / "test.jsonl"): "is one file, and gsm8k has 2",
        ("dapo-math-17k", "--source", prepared, "--output", prepared): "is the source and the output",
    }.items():
        with pytest.raises(ConfigError, match=said):
            data(*words)
    with pytest.raises(DataError, match="gsm8k-train.parquet could not be written"):
        data("gsm8k", "--source", gsm8k, "--output", gsm8k / "test.jsonl")


# ---- the hub ----


def test_the_hub_is_asked_for_the_known_commit_and_without_a_network_the_error_names_the_way_round_it(
    tmp_path, monkeypatch
):
    import datasets

    asked = []

    def load_dataset(**words):
        asked.append(words)
        if "AIME" in words["path"]:
            raise ConnectionError("offline")
        return datasets.Dataset.from_list([gsm8k_row(n) for n in range(3)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    said, revision = data("gsm8k", "--output", tmp_path), CATALOG["gsm8k"][0].revision
    of_all = {"path": "openai/gsm8k", "name": "main", "revision": revision}
    assert asked == [{**of_all, "split": split} for split in ("train", "test")]
    assert f"3 rows, 3 prompts, from 3 rows of openai/gsm8k at {revision}" in said
    command = "hf download BytedTsinghua-SIA/AIME-2024 --repo-type dataset --revision aa49075e24ad594b79fdf0bdcefa735c"
    with pytest.raises(DataError, match=f"ConnectionError: offline.*{command}.*--source FOLDER"):
        data("aime-2024", "--output", tmp_path)
