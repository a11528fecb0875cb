# SPDX-License-Identifier: Apache-2.0
"""A whole step of RL in `flashrl plan`: seconds by hand, its table, its picture, and what is left out of it."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.engines.shapes import load_config
from flashrl_verl.tools.plan import gpus
from flashrl_verl.tools.plan.memory import Engine
from flashrl_verl.tools.plan.planner import make_plan
from flashrl_verl.tools.plan.schedule import Work
from flashrl_verl.tools.plan.shape import shape_of
from flashrl_verl.tools.plan.whole_step import FORWARD, UPDATE, forward_operations, whole_step

H200 = gpus.find("h200")


@pytest.fixture(scope="module")
def qwen32b():
    return shape_of(load_config("qwen2.5-32b"))


def test_a_whole_step_by_hand(qwen32b):
    """64 H200s, 8192 sequences of 4096 tokens; 31.2 billion weights of projections and 0.78 of the head pass a
    token."""
    step = whole_step(qwen32b, H200, 64, rollout=100.0, sequences=8192, length=4096)
    tokens = 8192 * 4096
    products = 2 * tokens * (64 * (5120 * 5120 * 2 + 2 * 5120 * 1024 + 3 * 5120 * 27648) + 5120 * 152064)
    attention = (
        64 * 4 * 5120 * (4096 / 2) * tokens
    )  # queries x keys and weights x values, half of them behind the token
    forward = (products + attention) / (64 * 989e12)
    assert step.log_probs == pytest.approx(forward / FORWARD, rel=1e-3)
    assert step.update == pytest.approx(4 * forward / UPDATE, rel=1e-3)
    assert step.refit == pytest.approx(2 * qwen32b.parameters / 6e9)
    assert step.seconds == 100.0 + step.log_probs + step.update + step.refit


def test_a_token_passes_its_experts_and_no_others():
    shape = shape_of(load_config("qwen3-30b-a3b"))
    active = shape.linear + shape.expert * 8 / 128 + shape.head
    assert forward_operations(shape, 10, 0) == pytest.approx(20 * active)


def test_where_bf16_does_not_fit_steps_have_no_ratio():
    work = Work(sequences=8, prompt=256, response=256)
    plan = make_plan("qwen2.5-32b", shape_of(load_config("qwen2.5-32b")), gpus.find("a6000"), 8, Engine(), work)
    assert plan.outcomes[0].whole is None and all(outcome.speedup is None for outcome in plan.outcomes)
    assert any(outcome.whole is not None for outcome in plan.outcomes)


WORDS = [
    "plan",
    "--model",
    "qwen2.5-7b",
    "--gpu",
    "h200",
    "--gpus",
    "4",
    "--sequences",
    "64",
    "--response-length",
    "1000",
]


def test_the_table_the_json_and_the_picture_have_the_same_steps(tmp_path):
    result = CliRunner().invoke(
        app, [*WORDS, "--json", str(tmp_path / "a.json"), "--figure", str(tmp_path / "new" / "a.svg")]
    )
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "a.json").read_text())
    said = result.output[result.output.index("A step of RL with 64 sequences") :].splitlines()
    for outcome in record["outcomes"]:
        whole = outcome["whole"]
        assert whole["seconds"] == pytest.approx(
            sum(whole[part] for part in ("rollout", "log_probs", "update", "refit"))
        )
        ratio = record["outcomes"][0]["whole"]["seconds"] / whole["seconds"]
        expected = [
            f"{whole['rollout']:.1f}",
            f"{whole['seconds']:.1f}",
            f"{3600 / whole['seconds']:.3g}",
            f"{ratio:.2f}",
        ]
        assert any(
            [cells[i] for i in (-7, -3, -2, -1)] == expected for cells in map(str.split, said) if len(cells) >= 8
        )
    bars = [
        part for part in ElementTree.parse(tmp_path / "new" / "a.svg").iter() if part.get("id", "").startswith("patch_")
    ]
    assert len(bars) >= 4 * len(record["outcomes"])


@pytest.mark.parametrize(
    ("name", "part"), [("a.txt", "neither .png nor .svg"), ("file/a.png", "--figure .* cannot be written")]
)
def test_a_picture_that_cannot_be_is_one_error(tmp_path, name, part):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, [*WORDS, "--figure", str(tmp_path / name)])
    with pytest.raises(ConfigError, match=part):
        raise result.exception


def test_what_a_run_does_besides_is_said_to_be_left_out():
    words = ["plan", "experiment=dapo_qwen2.5_32b_int8", "--gpu", "h200", "correction=bypass"]
    result = CliRunner().invoke(app, [*words, "actor_rollout_ref.actor.use_kl_loss=true"])
    said = " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    for key in ("algorithm.rollout_correction.bypass_mode=True", "actor_rollout_ref.actor.use_kl_loss=True"):
        assert key in said and "Not in these figures" in said
