# SPDX-License-Identifier: Apache-2.0
"""Runs have names that tell them apart and claim nothing that was not held; what is no run is one error."""

import pytest
from report_runs import REJECTED, cells, make_run, metrics, two_runs

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.report import arms, comparison


@pytest.fixture
def two(tmp_path):
    return two_runs(tmp_path)


def test_a_name_never_claims_a_precision_that_the_engine_did_not_hold(tmp_path):
    [arm] = arms.load_arms([make_run(tmp_path / "folder", metrics(0.5, (1.0,), layers=0), seed=0)])
    assert arm.label == "folder"
    shown = cells(comparison.compare([tmp_path / "folder"]), 0)
    assert shown["precision"].endswith("NOT the precision that was chosen")


def test_a_mixture_is_not_called_by_one_of_its_precisions(tmp_path):
    mixed = make_run(tmp_path / "mixed", metrics(0.5, (1.0,), **{"flashrl/bf16_replicas": 1}), seed=0)
    plain = make_run(tmp_path / "plain", metrics(0.5, (1.0,), **{"flashrl/bf16_replicas": 0}), seed=0)
    assert [arm.label for arm in arms.load_arms([mixed, plain])] == ["INT8+BF16, TIS C=2", "INT8, TIS C=2"]
    compared = comparison.compare([mixed, plain])
    assert cells(compared, 0)["precision"] == "int8, 8 quantized layers; 1 of the replicas in bf16"
    assert cells(compared, 1)["precision"] == "int8, 8 quantized layers"


def test_a_name_says_that_keys_and_values_had_eight_bits(tmp_path):
    eight = make_run(tmp_path / "eight", metrics(0.5, (1.0,), **{"flashrl/kv_cache_bits": 8}), seed=0)
    sixteen = make_run(tmp_path / "sixteen", metrics(0.5, (1.0,), **{"flashrl/kv_cache_bits": 16}), seed=0)
    names = [arm.label for arm in arms.load_arms([eight, sixteen])]
    assert " with 8-bit KV, " in names[0] and "KV" not in names[1]
    rows = [dict(arm.runs[0].report.rows()) for arm in arms.load_arms([eight, sixteen])]
    assert [row["KV cache"] for row in rows] == ["8 bits", "16 bits"]


def test_a_name_never_says_no_correction_of_a_run_that_rejected(tmp_path):
    settings = {"rollout_is": None, "rollout_is_threshold": None}
    lines = metrics(0.5, (1.0,), **{REJECTED: 0.1})
    old = make_run(tmp_path / "folder", lines, correction=settings)
    new = make_run(tmp_path / "other", lines, correction=settings | {"rollout_rs": "token_k3"})
    assert [arm.label for arm in arms.load_arms([old, new])] == ["folder", "INT8, reject token_k3"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_is": None, "rollout_is_threshold": None}, "no correction"),
        ({"rollout_is": "sequence", "rollout_is_threshold": 8}, "TIS C=8 per sequence"),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, "IcePop 0.5-5.0"),
        ({"rollout_is": "token", "rollout_is_threshold": 2.0}, "TIS C=2"),
        ({"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"}, "IcePop 0.5-5.0 per sequence"),
        ({"rollout_is": None, "rollout_rs": "seq_mean_k1"}, "reject seq_mean_k1"),
        ({"rollout_is": "token", "rollout_is_threshold": 8.0, "rollout_rs": "token_k2"}, "TIS C=8, reject token_k2"),
        ({"rollout_is": None, "bypass_mode": True}, "bypass"),
        ({"rollout_is": None}, "no correction"),
    ],
)
def test_a_legend_tells_corrections_apart(settings, words):
    assert arms.short_correction(settings) == words


def test_names_are_unique_whatever_the_runs_have_in_common(tmp_path):
    lines = metrics(0.5, (1.0,))
    seeds = [make_run(tmp_path / f"s{seed}", lines, seed=seed) for seed in (0, 1)]
    assert [arm.label for arm in arms.load_arms(seeds)] == ["INT8, TIS C=2, seed 0", "INT8, TIS C=2, seed 1"]
    same = [*seeds, make_run(tmp_path / "again", lines, seed=1)]
    assert [arm.label for arm in arms.load_arms(same)] == [f"INT8, TIS C=2, {name}" for name in ("s0", "s1", "again")]
    deep = [make_run(tmp_path / a / "run", lines) for a in "ab"]
    assert [arm.label for arm in arms.load_arms(deep)] == ["run, run 1", "run, run 2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not there"),
        ("", "holds no step"),
        ("a,b\n1,2\n", r"line 1 is not \{\"step\": n"),
        ("\n\n[1]\n", "line 3 is not"),
    ],
)
def test_what_is_no_metrics_file_is_one_error(tmp_path, two, content, said):
    path = tmp_path / "other.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FlashRLError, match=said) as error:
        comparison.compare([*two, path])
    assert str(path) in str(error.value)


def test_the_same_file_twice_is_refused_also_by_another_path(two):
    with pytest.raises(FlashRLError, match="the same file as"):
        arms.load_arms([*two, two[0] / "metrics.jsonl"])


@pytest.mark.parametrize(
    ("names", "said"), [(["one"], "1 --name for 2 runs"), (["one", "one"], "occurs twice"), (["one", " "], "is empty")]
)
def test_names_that_do_not_fit_are_refused(two, names, said):
    with pytest.raises(FlashRLError, match=said):
        arms.load_arms(two, names)
