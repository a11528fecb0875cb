# SPDX-License-Identifier: Apache-2.0
"""The tables of whole steps in docs/results are those of the raw data beside them, and of the plan as it is."""

import json
import re

from result_pages import RESULTS, drawn, page, tables
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.tools.plan.whole_step import FORWARD, UPDATE


def test_every_whole_step_is_in_the_table_as_it_is_planned_today(tmp_path):
    shown, _ = tables("step.md")
    expected = []
    for gpu in ("h200", "a100-80gb"):
        planned = tmp_path / "plan.json"
        words = ["plan", "experiment=dapo_qwen2.5_32b_int8", "--gpu", gpu, "--gpus", "64", "--json", str(planned)]
        words += ["--figure", str(planned.with_suffix(".png"))]
        assert CliRunner().invoke(app, words).exit_code == 0
        record = json.loads(planned.read_text())
        kept = json.loads((RESULTS / "step" / f"{gpu}.json").read_text())
        del kept["blocks_refused"], kept["written_bytes"]["fp8_block"]  # a precision that was removed since
        assert record == kept
        bf16 = record["outcomes"][0]["whole"]["seconds"]
        for outcome in record["outcomes"]:
            if whole := outcome["whole"]:
                name = "{precision}{}".format(
                    " + INT8 KV" * (outcome["choice"]["kv_cache"] != "auto"), **outcome["choice"]
                )
                seconds = [f"{whole[part]:.0f}" for part in ("rollout", "log_probs", "update", "refit", "seconds")]
                ratio = f"{bf16 / whole['seconds']:.2f}"
                expected.append([f"64 x {gpu}", name, *seconds, f"{3600 / whole['seconds']:.3g}", ratio])
        assert drawn(RESULTS / "step" / f"{gpu}.png") == drawn(planned.with_suffix(".png"))
    assert shown[1:] == expected
    a100 = json.loads((RESULTS / "step" / "a100-80gb.json").read_text())["advice"]
    assert "1.09x is what eight bits gain" in a100[0] and a100[1].startswith(
        "Stay with BF16 weights where you can have that layout"
    )
    ratios = {(row[0], row[1]): row[-1] for row in expected}
    said = re.search(
        r"make it ([\d.]+) to ([\d.]+) times .* them ([\d.]+) to ([\d.]+), alone ([\d.]+) to ([\d.]+)$",
        page("step.md").splitlines()[0],
    )
    arms = ("int8", "int8 + INT8 KV", "bf16 + INT8 KV")
    assert list(said.groups()) == [ratios[f"64 x {gpu}", arm] for arm in arms for gpu in ("h200", "a100-80gb")]


def test_the_trainers_part_of_a_step_is_what_was_measured_and_what_is_planned_with():
    records = [json.loads((RESULTS / "step" / f"training{which}.json").read_text()) for which in ("", "-again")]
    expected = []
    for number, record in enumerate(records, start=1):
        tokens, (few, many) = record["settings"]["tokens"], record["settings"]["layers"]
        for one in record["passes"]:
            each = [f"{one['layer_s'] * 1e3:.2f}", f"{one['head_s'] * 1e3:.2f}", f"{one['whole_s']:.2f}"]
            wholes = [
                low + (64 - few) * (high - low) / (many - few)
                for low in one["seconds"]["2"]
                for high in one["seconds"]["6"]
            ]
            least, most = (one["share"] * one["whole_s"] / seconds for seconds in (max(wholes), min(wholes)))
            share = f"{one['share']:.0%} ({least:.0%}-{most:.0%})"
            expected.append([one["name"], str(number), *each, f"{tokens / one['whole_s']:.0f}", share])
    assert tables("step.md")[1][1:] == sorted(expected, key=lambda row: row[0])
    for record in records:
        assert [FORWARD, UPDATE] == [round(one["share"], 2) for one in record["passes"]]
