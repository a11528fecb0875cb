# SPDX-License-Identifier: Apache-2.0
"""`flashrl eval` up to its engines: what is asked, what a response is worth, what is refused, and what the report
says."""

import dataclasses
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from flashrl_verl.errors import ConfigError, DataError, FlashRLError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.evaluate.engine import LOG, Answer, require_engine
from flashrl_verl.tools.evaluate.evaluate import EvalConfig, longest_of
from flashrl_verl.tools.evaluate.kept import ANSWER, GENERATED, clear, finished
from flashrl_verl.tools.evaluate.problems import Problem, read_problems
from flashrl_verl.tools.evaluate.report import Evaluated, Report
from flashrl_verl.tools.evaluate.scoring import load_reward, score


def row(question: str, answer: str = "1", source: str = "toy_addition", index: int = 0) -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }


def write(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


PROBLEM = Problem(
    data_source="toy_addition", messages=[{"role": "user", "content": "1+1="}], ground_truth="2", extra_info={}
)


# ---- problems ----


def test_copies_of_a_problem_are_one_problem(tmp_path):
    files = [
        write(tmp_path / "a.parquet", [row("x"), row("y"), row("x")]),
        write(tmp_path / "b.parquet", [row("x"), row("z")]),
    ]
    problems, rows = read_problems(files)
    assert [problem.messages[0]["content"] for problem in problems] == ["x", "y", "z"] and rows == 5
    problems, rows = read_problems(files, limit=1)
    assert [problem.messages[0]["content"] for problem in problems] == ["x"] and rows == 3


def test_one_question_with_two_answers_or_sources_is_two_problems(tmp_path):
    file = write(tmp_path / "a.parquet", [row("x"), row("x", answer="2"), row("x", source="other")])
    assert len(read_problems([file])[0]) == 3


@pytest.mark.parametrize(
    "rows, said",
    [
        ([{"prompt": [{"role": "user", "content": "x"}]}], "no column data_source, reward_model"),
        ([row("x") | {"prompt": "x"}], "row 0: `prompt` is no list of messages"),
        ([row("x") | {"reward_model": {"style": "rule", "ground_truth": None}}], "row 0: `reward_model.ground_truth`"),
    ],
)
def test_files_of_another_format_are_refused_by_row_and_column(tmp_path, rows, said):
    with pytest.raises(DataError, match=said):
        read_problems([write(tmp_path / "a.parquet", rows)])


def test_a_file_that_is_no_parquet_or_not_there_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("no")
    for name in ("a.parquet", "absent.parquet"):
        with pytest.raises(DataError, match=name):
            read_problems([tmp_path / name])


# ---- rewards ----


def test_the_toys_reward_is_loaded_by_path_and_name():
    import flashrl_verl.quickstart.reward as toy

    reward = load_reward(f"{toy.__file__}:compute_score")
    assert [score(reward, PROBLEM, text) for text in ("2", "3")] == [1.0, 0.0]


def test_verls_reward_is_the_default_and_an_unknown_source_is_refused():
    gsm8k = dataclasses.replace(PROBLEM, data_source="openai/gsm8k")
    assert score(load_reward(None), gsm8k, "so it is #### 2") == 1.0
    with pytest.raises(ConfigError, match="--reward-function"):
        score(load_reward(None), PROBLEM, "2")


async def _asynchronous(data_source, solution_str, ground_truth, extra_info):
    return {"score": -1.0, "acc": solution_str == ground_truth}


def test_acc_counts_before_the_score_and_a_coroutine_is_awaited():
    assert score(_asynchronous, PROBLEM, "2") == 1.0
    assert score(_asynchronous, PROBLEM, "3") == 0.0


@pytest.mark.parametrize("gives", [None, "much", float("nan"), {}])
def test_a_reward_that_is_no_number_is_refused(gives):
    with pytest.raises(FlashRLError, match="is no number"):
        score(lambda **_: gives, PROBLEM, "2")


@pytest.mark.parametrize(
    "spec, said", [("reward.py", "path:name"), ("/absent.py:f", "no file"), (f"{__file__}:absent", "absent")]
)
def test_a_reward_that_is_not_there_is_refused(spec, said):
    with pytest.raises(ConfigError, match=said):
        load_reward(spec)


# ---- settings ----


@pytest.mark.parametrize(
    "change, said",
    [
        ({"temperature": 0.0}, "Set --n 1"),
        ({"temperature": -1.0}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"precisions": (Precision.INT8, Precision.INT8)}, "twice"),
    ],
)
def test_settings_without_a_meaning_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        EvalConfig(checkpoint=Path("x"), data=(Path("y"),), **change)


def test_finished_responses_are_used_again_only_under_the_same_settings(tmp_path):
    settings = {"seed": 0, "samples": 4}
    assert not finished(tmp_path, Precision.INT8, settings, force=False)
    (tmp_path / "int8").mkdir()
    (tmp_path / "int8" / GENERATED).write_text(json.dumps(settings))
    (tmp_path / "int8" / ANSWER).write_text(json.dumps(dataclasses.asdict(evaluated("int8", [[1]]).answer)))
    assert finished(tmp_path, Precision.INT8, settings, force=False)
    assert not finished(tmp_path, Precision.INT8, settings, force=True)
    with pytest.raises(ConfigError, match=r"--n 4 \(now 8\)"):
        finished(tmp_path, Precision.INT8, settings | {"samples": 8}, force=False)


def test_only_what_an_evaluation_left_is_replaced(tmp_path):
    clear(tmp_path / "absent", LOG)
    mine = tmp_path / "int8"
    mine.mkdir()
    (mine / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not replaced"):
        clear(mine, LOG)
    assert (mine / "notes.txt").exists()
    (mine / LOG).touch()
    clear(mine, LOG)
    assert not mine.exists()


def _layers(precision: str, quantized: dict[str, int]) -> dict:
    cache = {"dtypes": {"auto": 2}, "backends": ["CPU_ATTN"]}
    held = {"precision": precision, "quantized": quantized, "ignore_unused": [], "kv_cache": cache}
    return held | {"unquantized_layers": {}, "kept_layers": [], "kept_indices": []}


NONE_KEPT = {"ignore": [], "keep_first_layers": 0, "keep_last_layers": 0}


def test_an_engine_that_holds_something_else_than_its_name_says_is_refused():
    require_engine(Precision.BF16, [_layers("None", {})], NONE_KEPT)
    require_engine(Precision.INT8, [_layers("int8", {"int8": 8})] * 2, NONE_KEPT)
    for precision, workers in [
        (Precision.INT8, [_layers("int8", {"int8": 8}), _layers("None", {})]),
        (Precision.INT8, [_layers("int8", {})]),
        (Precision.BF16, [_layers("int8", {"int8": 8})]),
        (Precision.BF16, [_layers("CompressedTensorsConfig(...)", {})]),
    ]:
        with pytest.raises(FlashRLError, match=f"--precision {precision.value}"):
            require_engine(precision, workers, NONE_KEPT)


def test_an_engine_with_a_layer_that_the_quantizer_does_not_know_is_refused_by_its_name():
    name, held = "model.layers.0.mixer.in_proj", _layers("int8", {"int8": 8})
    half = held | {"unquantized_layers": {name: "ColumnParallelLinear"}}
    with pytest.raises(
        FlashRLError, match=rf"--precision int8 would leave 1 layers .*{name}.*ColumnParallelLinear.*--ignore"
    ):
        require_engine(Precision.INT8, [held, half], NONE_KEPT)
    require_engine(Precision.INT8, [half | {"kept_layers": [name]}], NONE_KEPT)
    require_engine(
        Precision.BF16, [_layers("None", {}) | {"unquantized_layers": {name: "ColumnParallelLinear"}}], NONE_KEPT
    )


def test_layers_to_keep_that_the_model_does_not_have_are_refused():
    kept, held = {"ignore": [], "keep_first_layers": 2, "keep_last_layers": 1}, _layers("int8", {"int8": 8})
    require_engine(Precision.INT8, [held | {"kept_indices": [0, 1, 27]}], kept)
    require_engine(Precision.BF16, [_layers("None", {})], kept)
    with pytest.raises(
        FlashRLError, match="--keep-first-layers 2 and --keep-last-layers 1 keep 1 layers .* instead of 3"
    ):
        require_engine(Precision.INT8, [held | {"kept_indices": [0]}], kept)


@pytest.mark.parametrize(
    "rope, expected",
    [
        (None, 1000),
        ({"rope_type": "default", "rope_theta": 10000.0}, 1000),
        ({"rope_type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250},
            1000,
        ),  # given as scaled already
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 125}, 1000),
    ],
)
def test_a_model_is_as_long_as_vllm_lets_it_be(rope, expected, tmp_path):
    from transformers import AutoConfig, Qwen2Config
    from vllm.config import ModelConfig

    if rope and rope["rope_type"] == "llama3":
        rope = rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = dict(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=64
    )
    config = Qwen2Config(max_position_embeddings=1000, vocab_size=32, architectures=["Qwen2ForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = {key: value for key, value in json.loads(file.read_text()).items() if key != "rope_parameters"}
    file.write_text(json.dumps(content | ({"rope_scaling": rope, "rope_theta": 10000.0} if rope else {})))
    assert longest_of(AutoConfig.from_pretrained(tmp_path)) == expected
    assert ModelConfig(str(tmp_path), skip_tokenizer_init=True).max_model_len == expected


# ---- report ----


def evaluated(precision: str, values: list[list[float]]) -> Evaluated:
    answer = Answer(
        responses=[[[1]] * len(group) for group in values],
        truncated=[[False, True] for _ in values],
        layers={"quantized_layers": 8 if precision == "int8" else 0, "unquantized_layers": 0},
        kernels={"linear": "onednn", "experts": "onednn"},
        seconds={"start": 1.0, "generate": 2.0},
    )
    return Evaluated(precision=precision, values=values, answer=answer, generated=True)


def test_the_report_tells_each_source_and_all_of_them_and_differences_from_the_first(tmp_path):
    problems = [dataclasses.replace(PROBLEM, data_source=source) for source in ("a", "b", "b", "b")]
    bf16, int8 = [[1, 1], [1, 0], [0, 0], [1, 1]], [[1, 1], [0, 0], [0, 0], [1, 1]]
    report = Report.of([evaluated("bf16", bf16), evaluated("int8", int8)], problems, 1.0, 0, {"step": 3})
    assert report.problems == {"a": 1, "b": 3, "all": 4}
    assert report.figures["b"]["mean@2"]["bf16"].value == pytest.approx(0.5)
    assert report.figures["b"]["pass@2"]["bf16"].value == pytest.approx(2 / 3)
    gap = report.differences["b"]["mean@2"]["int8"]
    assert gap.value == pytest.approx(-1 / 6) and gap.low < gap.value <= gap.high == 0.0
    told = json.loads(report.write(tmp_path).read_text())
    assert told["step"] == 3 and told["precisions"]["int8"]["values"] == int8
    assert (
        told["figures"]["all"]["mean@2"]["int8"]["value"] == 0.5 and "bf16" not in told["differences"]["all"]["mean@2"]
    )
    assert told["precisions"]["bf16"]["truncated"] == 0.5
    table = report.table()
    assert [column.header for column in table.columns][3:] == ["bf16", "int8", "int8 - bf16"] and table.row_count == 6
    assert report.notes()[1].startswith("int8: 8 layers quantized, 0 not (kernel: onednn), generated in 2 s")
