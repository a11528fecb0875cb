# SPDX-License-Identifier: Apache-2.0
"""`flashrl data`: what verl's dataset and rewards make of the files, copies of a prompt, wrong rows, the hub."""

import json
import random
import re
from pathlib import Path

import pyarrow
import pytest
from omegaconf import OmegaConf
from pyarrow import parquet
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.tools.data import CATALOG

ROOT = Path(__file__).parents[2]


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
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read(path: Path) -> list[dict]:
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
    rows = {
        "data/dapo-math-17k": [math_row(f"{n} + 1", str(n + 1)) for n in range(6)] * 3,
        "data/aime-2024": [math_row(f"{n} + 30", f"{n + 30:03}") for n in range(3)] * 4,
        "main/train-00000-of-00001": [gsm8k_row(n) for n in range(998, 1003)],
        "main/test-00000-of-00001": [gsm8k_row(n) for n in range(4)],
    }
    for path, of_file in rows.items():
        save(tmp_path / f"{path}.parquet", of_file)
    for name in CATALOG:
        data(name, "--source", tmp_path, "--output", tmp_path / "out")
    return tmp_path / "out"


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
    """verl's own dataset of a file."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    def load(file: Path):
        config = {"cache_dir": str(tmp_path), "max_prompt_length": 100, "filter_overlong_prompts_workers": None}
        return RLHFDataset([str(file)], tokenizer, OmegaConf.create(config))

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


def test_the_experiments_look_for_the_files_that_are_written():
    experiments = (ROOT / "flashrl_verl" / "configs" / "experiment").glob("*.yaml")
    named = {name for path in experiments for name in re.findall(r"files: data/(\S+)", path.read_text())}
    assert named == {wanted.output for splits in CATALOG.values() for wanted in splits}


# ---- copies of a prompt ----


@pytest.mark.parametrize("seed", range(3))
def test_copies_go_and_so_do_prompts_with_several_answers(tmp_path, seed):
    rng = random.Random(seed)
    asked = [(rng.randrange(40), rng.choice(["1", "1", "1", "01", "2"])) for _ in range(100)]
    save(tmp_path / "data" / "dapo-math-17k.parquet", [math_row(f"Problem {q}.", answer) for q, answer in asked])
    answers = {q: {int(answer) for other, answer in asked if other == q} for q, _ in asked}
    order = [q for q in dict.fromkeys(q for q, _ in asked) if len(answers[q]) == 1]

    def of(row):
        return int(row["prompt"][0]["content"].split()[-1][:-1]), int(row["reward_model"]["ground_truth"])

    said = data("dapo-math-17k", "--source", tmp_path, "--output", tmp_path)
    rows = read(tmp_path / "dapo-math-17k.parquet")
    assert [of(row) for row in rows] == [(q, *answers[q]) for q in order]
    assert [row["extra_info"] for row in rows] == [{"split": "train", "index": n} for n in range(len(order))]
    several = len(answers) - len(order)
    assert f"{len(order)} rows, {len(order)} prompts, from 100 rows; {several} prompts with several answers" in said


# ---- what cannot be used ----


def test_what_cannot_be_used_is_one_error_and_no_split_is_written(prepared):
    source, output = prepared.parent, prepared.parent / "other"
    bad = save(
        source / "main" / "test-00000-of-00001.parquet", [gsm8k_row(1), {"question": "Why?", "answer": "#### five"}]
    )
    with pytest.raises(FlashRLError, match="does not end in .* but: '#### five'"):
        data("gsm8k", "--source", source, "--output", output)
    for damage in (lambda: bad.write_text("not found"), bad.unlink):
        damage()
        with pytest.raises(FlashRLError, match="test-00000-of-00001.parquet was not read: .*hf download openai/gsm8k"):
            data("gsm8k", "--source", source, "--output", output)
    save(bad, [gsm8k_row(1) | {"answer": "#### 1"}])
    (source / "test.jsonl").write_text("{")
    with pytest.raises(FlashRLError, match="test.jsonl was not read: .*Remedy"):
        data("gsm8k", "--source", source, "--output", output)
    for row in ({"text": "Why?"}, {"question": "Why?", "answer": None}):
        (source / "test.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(
            FlashRLError, match=rf"test split is not of .*Error.* it has {', '.join(row)}. Remedy: .*--source"
        ):
            data("gsm8k", "--source", source, "--output", output)
    assert not output.exists()
    with pytest.raises(ConfigError, match="is the source and the output"):
        data("dapo-math-17k", "--source", source, "--output", source / "data")


def test_json_lines_are_read_as_gsm8ks_authors_publish_them(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(gsm8k_row(n))}\n" for n in range(3)))
    assert "3 rows, 3 prompts" in data("gsm8k-boxed", "--source", tmp_path, "--output", tmp_path / "out")
    assert [row["reward_model"]["ground_truth"] for row in read(tmp_path / "out" / "gsm8k-boxed-test.parquet")] == [
        *"012"
    ]


# ---- the hub ----


def test_the_hub_is_asked_for_the_known_commit_and_without_a_network_the_error_names_the_way_round_it(
    prepared, monkeypatch
):
    import huggingface_hub

    asked = []

    def download(hub_id, path, **words):
        asked.append((hub_id, path, words))
        if "AIME" in hub_id:
            raise ConnectionError("offline")
        return prepared.parent / path

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    said, revision = data("gsm8k", "--output", prepared), CATALOG["gsm8k"][0].revision
    words = {"repo_type": "dataset", "revision": revision}
    assert asked == [("openai/gsm8k", f"main/{s}-00000-of-00001.parquet", words) for s in ("train", "test")]
    assert "4 rows, 4 prompts, from 4 rows" in said
    command = "hf download BytedTsinghua-SIA/AIME-2024 --repo-type dataset --revision aa49075e24ad594b79fdf0bdcefa735c"
    with pytest.raises(FlashRLError, match=f"ConnectionError: offline.*{command}.*--source FOLDER"):
        data("aime-2024", "--output", prepared)
