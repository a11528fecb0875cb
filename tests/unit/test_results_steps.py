# SPDX-License-Identifier: Apache-2.0
"""The tables of whole steps in docs/results are those of the raw data beside them, and of the plan as it is."""

import json
import re

from result_pages import RESULTS, page, tables
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.plan.whole_step import FORWARD, UPDATE


def test_every_whole_step_is_in_the_table_as_it_is_planned_today(tmp_path):
    shown, _ = tables("step.md")
    expected = []
    for gpu in ("h200", "a100-80gb"):
        planned = tmp_path / "plan.json"
        words = ["plan", "experiment=dapo_qwen2.5_32b_int8", "--gpu", gpu, "--gpus", "64", "--json", str(planned)]
        assert CliRunner().invoke(app, words).exit_code == 0
        record = json.loads(planned.read_text())
        assert record == json.loads((RESULTS / "step" / f"{gpu}.json").read_text())
        bf16 = record["outcomes"][0]["whole"]["seconds"]
        for outcome in record["outcomes"]:
            if whole := outcome["whole"]:
                name = "{precision}{}".format(" + INT8 KV" * (outcome["choice"]["kv_cache"] != "auto"), **outcome["choice"])
                seconds = [f"{whole[part]:.0f}" for part in ("rollout", "log_probs", "update", "refit", "seconds")]
                ratio = f"{bf16 / whole['seconds']:.2f}"
                expected.append([f"64 x {gpu}", name, *seconds, f"{3600 / whole['seconds']:.3g}", ratio])
    assert shown[1:] == expected
    ratios = {(row[0], row[1]): row[-1] for row in expected}
    said = re.search(r"make it ([\d.]+) to ([\d.]+) times .* them ([\d.]+) to ([\d.]+)", page("step.md").splitlines()[0])
    assert list(said.groups()) == [
        ratios[f"64 x {gpu}", arm] for arm in ("int8", "int8 + INT8 KV") for gpu in ("h200", "a100-80gb")
    ]


def test_the_trainers_part_of_a_step_is_what_was_measured_and_what_is_planned_with():
    record = json.loads((RESULTS / "step" / "training.json").read_text())
    tokens, expected = record["settings"]["tokens"], []
    for one in record["passes"]:
        each = [f"{one['layer_s'] * 1e3:.2f}", f"{one['head_s'] * 1e3:.2f}", f"{one['whole_s']:.2f}"]
        expected.append([one["name"], *each, f"{tokens / one['whole_s']:.0f}", f"{one['share']:.0%}"])
    assert tables("step.md")[1][1:] == expected
    assert [FORWARD, UPDATE] == [round(one["share"], 2) for one in record["passes"]]
