# SPDX-License-Identifier: Apache-2.0
"""What `flashrl eval` makes of verl's dumps of validations, and which checkpoint it and `flashrl export` take."""

import json

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.input_files import LATEST
from flashrl_verl.settings import Precision
from flashrl_verl.tools import evaluate
from flashrl_verl.tools.evaluate import compare, read
from flashrl_verl.tools.export.checkpoint import find
from flashrl_verl.tools.recipe_process import compose

TRUTHS = {"1+1?": "2", "How many?": "2", "How many primes?": "17"}
PROBLEMS = [*TRUTHS, "How many primes?"]
"""The last is in the data twice."""


def dump(file, right: dict[str, int], n: int = 2):
    """As verl dumps it: responses in any order, the reward's own ``acc`` beside a score with a penalty in it."""
    lines = [
        {"input": text, "gts": TRUTHS[text], "score": -0.5, "acc": bool(sample < right[text])}
        for text in PROBLEMS
        for sample in range(n)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[::-1]))


def test_dumps_give_figures_by_problem_and_differences_in_pairs(tmp_path):
    found = {}
    for name, right in (("bf16", (2, 1, 0)), ("int8", (1, 1, 1))):
        dump(tmp_path / name, dict(zip(TRUTHS, right, strict=True)))
        found[name] = read(tmp_path / name, 2)
    rows = compare(found)
    assert list(rows) == ["bf16", "int8", "int8 - bf16"] and list(rows["bf16"]) == ["mean@2", "pass@2"]
    assert rows["bf16"]["mean@2"].value == pytest.approx((1 + 0.5 + 0) / 3)
    # The problem that is there twice has four responses, two of them right: C(2, 2) of C(4, 2) pairs have none.
    assert rows["int8"]["pass@2"].value == pytest.approx((1 + 1 + 5 / 6) / 3)
    gap = rows["int8 - bf16"]["mean@2"]
    assert gap.value == pytest.approx((-0.5 + 0 + 0.5) / 3) and (gap.low, gap.high) == (-0.5, 0.5)


def test_missing_responses_and_other_problems_are_refused(tmp_path):
    file = tmp_path / "responses.jsonl"
    dump(file, dict.fromkeys(TRUTHS, 1))
    found = read(file, 2)
    other = {key: values for key, values in found.items() if "1+1?" not in key[0]}
    with pytest.raises(FlashRLError, match="answered different problems"):
        compare({"bf16": found, "int8": other})
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(FlashRLError, match=r"1 prompts lack responses \(2 each\)"):
        read(file, 2)


def test_a_list_of_many_files_is_an_override(tmp_path):
    refused = CliRunner().invoke(app, ["eval", str(tmp_path / "no"), f"data.val_files=[{','.join(['a' * 100] * 4)}]"])
    assert refused.exit_code and f"{tmp_path / 'no'} is not a folder" in str(refused.exception or refused.output)


def test_a_precision_that_there_is_not_is_refused_with_those_that_there_are():
    refused = CliRunner().invoke(app, ["eval", "model", "--precision", "int8,int9"])
    assert refused.exit_code == 2 and "is not of int8, fp8, bf16" in " ".join(refused.output.split())


def test_what_is_done_is_not_run_again_and_other_words_weights_and_runs_are_kept_apart(tmp_path, monkeypatch):
    ran = []

    def validate(checkpoint, model, words, folder):
        ran.append(words)
        dump(folder / evaluate.RESPONSES, dict.fromkeys(TRUTHS, len(ran) % 2))

    def run(*words: str) -> int:
        before = len(ran)
        done = CliRunner().invoke(app, ["eval", *words, "--n", "2", "--output", str(tmp_path / "out")])
        assert done.exit_code == 0, done.exception or done.output
        return len(ran) - before

    monkeypatch.setattr(evaluate, "validate", validate)
    models = [tmp_path / name / "model" for name in "ab"]
    for model in models:
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_text("weights")
    first, second = map(str, models)
    assert run(first, "--precision", "bf16,int8") == 2 and run(first, "--precision", "int8,bf16") == 0
    assert "++flashrl.precision=bf16" in ran[0] and "++flashrl.precision=int8" in ran[1]
    assert run(first, "data.val_files=aime.parquet") == 1 and ran[-1][-1] == "data.val_files=aime.parquet"
    assert run(first, second) == 1  # of one name, and the first was done
    report = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert report["problems"] == 3 and len(report["figures"]) == 3
    assert [row["mean@2"]["value"] for row in report["figures"].values()] == pytest.approx([0.5, 0.0, -0.5])
    (models[0] / "model.safetensors").write_text("other weights")
    assert run(first) == 1
    [refused] = [CliRunner().invoke(app, ["eval", "data.val_files=aime.parquet"]).exception]
    assert isinstance(refused, ConfigError) and "name a checkpoint" in str(refused)


def test_an_override_reaches_all_that_follows_its_key_in_a_kept_configuration(tmp_path):
    trained = compose(["experiment=dapo_qwen2.5_32b_int8"])
    trained.actor_rollout_ref.rollout.prompt_length = 7  # its own, not data.max_prompt_length
    OmegaConf.resolve(trained)  # as verl does before a trainer sees it
    checkpoint = find(saved(tmp_path / "run", 3))
    assert evaluate.configuration(checkpoint, tmp_path / "out") is None
    (checkpoint.path.parent / "config.yaml").write_text(OmegaConf.to_yaml(trained))
    kept = OmegaConf.load(evaluate.configuration(checkpoint, tmp_path / "out"))
    kept.data.max_response_length, kept.data.max_prompt_length, kept.flashrl.precision = 4096, 1024, "bf16"
    rollout = kept.actor_rollout_ref.rollout
    assert (rollout.response_length, rollout.prompt_length, rollout.custom.flashrl.precision) == (4096, 7, "bf16")
    for key, value in (("data.max_response_length", 20480), ("data.max_prompt_length", 2048)):
        OmegaConf.update(kept, key, value)
    kept.flashrl.precision = "int8"
    OmegaConf.resolve(kept)
    assert kept == trained


@pytest.mark.parametrize("precision", Precision)
def test_what_is_compared_has_one_kv_cache_and_all_responses(tmp_path, precision):
    words = evaluate.recipe_words(None, precision, {}, tmp_path)
    of_flashrl = dict(word.removeprefix("++flashrl.").split("=") for word in words if "flashrl." in word)
    ignore = {"ignore": "[]"} if precision is Precision.BF16 else {}
    assert of_flashrl == {"precision": precision.value, "kv_cache": "auto", "failed_responses_max": "0", **ignore}


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
    assert (find(run).step, find(run).name) == (10, "dapo-7b-step10")
    last = run / below / "global_step_20"
    assert find(last) == find(last / "actor") and find(last).path == last / "actor"
    (run / below / LATEST).write_text("")  # it was itself being written
    assert find(run).step == 20
    (run / below / LATEST).write_text("8")
    with pytest.raises(ConfigError, match="no checkpoint of step 8. It has 9, 10, 20"):
        find(run)


def test_what_is_no_checkpoint_says_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.save_freq"):
        find(tmp_path)
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--backend megatron"):
        find(tmp_path)
    (tmp_path / "global_step_3" / "actor").rmdir()
    with pytest.raises(ConfigError, match="has no weights: verl removes"):
        find(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        find(tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(ConfigError, match=r"quantized already \(awq\)"):
        find(tmp_path)
