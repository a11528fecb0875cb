# SPDX-License-Identifier: Apache-2.0
"""What `flashrl eval` makes of verl's dump of a validation, and which checkpoint it and `flashrl export` take."""

import json

import pytest

from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.evaluate.evaluate import EvalConfig, read, sources, summarize, table
from flashrl_verl.tools.export.checkpoint import LATEST, find

ROWS = [  # of two data sets; the third problem is in its file twice
    ("math", "1+1?", "2"),
    ("aime", "How many?", "2"),
    ("aime", "How many primes?", "17"),
    ("aime", "How many primes?", "17"),
]


@pytest.fixture
def data(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"data_source": source, "prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": truth}}
        for source, text, truth in ROWS
    ]
    file = tmp_path / "test.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def dump(file, right: dict[str, int], n: int = 2):
    """As verl dumps it: responses in random order, the reward's own ``acc`` beside a score with a penalty in it."""
    lines = [
        {"input": f"user\n{text}\nassistant\n", "gts": truth, "score": -0.5, "acc": bool(sample < right[text])}
        for _, text, truth in ROWS
        for sample in range(n)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[::-1]))
    return read(file, n)


def test_a_dump_gives_each_source_its_figures_and_paired_differences(data, tmp_path):
    found = {
        Precision.BF16: dump(tmp_path / "bf16.jsonl", {"1+1?": 2, "How many?": 1, "How many primes?": 0}),
        Precision.INT8: dump(tmp_path / "int8.jsonl", {"1+1?": 1, "How many?": 1, "How many primes?": 1}),
    }
    report = summarize(found, sources([str(data)]), 2)
    assert report["problems"] == {"aime": 2, "math": 1, "all": 3}
    value = lambda tree, source, name, precision: tree[source][name][precision]["value"]  # noqa: E731
    assert value(report["figures"], "math", "mean@2", "bf16") == 1.0
    assert value(report["figures"], "aime", "mean@2", "bf16") == 0.25
    # The problem that is there twice has four responses, two of them right: C(2, 2) of C(4, 2) pairs have none.
    assert value(report["figures"], "aime", "pass@2", "int8") == pytest.approx((1 + 5 / 6) / 2)
    assert value(report["differences"], "all", "mean@2", "int8") == pytest.approx((-0.5 + 0 + 0.5) / 3)
    text = table(report, ["bf16", "int8"])
    assert "int8 - bf16" in text and len({len(line) for line in text.splitlines()}) == 1


def test_missing_responses_and_other_problems_are_refused(data, tmp_path):
    file = tmp_path / "responses.jsonl"
    found = dump(file, {"1+1?": 2, "How many?": 1, "How many primes?": 0})
    other = {key: values for key, values in found.items() if "1+1?" not in key[0]}
    with pytest.raises(FlashRLError, match="answered different problems"):
        summarize({Precision.BF16: found, Precision.INT8: other}, {}, 2)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(FlashRLError, match="1 prompts have not 2 responses each"):
        read(file, 2)


def test_greedy_samples_of_a_problem_are_refused(tmp_path):
    checkpoint = saved(tmp_path / "run", 1)
    with pytest.raises(ConfigError, match="Set --n 1"):
        EvalConfig(checkpoint=find(checkpoint), precisions=(Precision.BF16,), n=2, temperature=0.0, output=tmp_path)


# ---- which checkpoint ----


def saved(run, step: int):
    actor = run / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "fsdp_config.json").write_text("{}")
    return actor.parent


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_of_a_run_the_last_whole_checkpoint_is_taken_or_the_one_that_is_named(tmp_path, below):
    run = tmp_path / "dapo-7b"
    for step in (9, 10, 20):
        saved(run / below, step)
    assert find(run).step == 20
    (run / below / LATEST).write_text("10")  # step 20 was being written when the run stopped
    assert (find(run).step, find(run).name, find(run).run) == (10, "dapo-7b-step10", run)
    assert find(run, 9).path == run / below / "global_step_9" / "actor"
    assert find(run / below / "global_step_20") == find(run / below / "global_step_20" / "actor") == find(run, 20)
    with pytest.raises(ConfigError, match="no checkpoint of step 8. It has 9, 10, 20"):
        find(run, 8)
    with pytest.raises(ConfigError, match="is step 9. Leave --step out"):
        find(run / below / "global_step_9", 10)


def test_what_is_no_checkpoint_says_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.save_freq"):
        find(tmp_path)
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--backend megatron"):
        find(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        find(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(ConfigError, match=r"quantized already \(awq\)"):
        find(tmp_path)
