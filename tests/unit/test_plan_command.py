# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan` on the command line: a run's overrides, files, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flashrl_verl
from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.tools.engines.shapes import SHAPES
from flashrl_verl.tools.plan.gpus import find
from flashrl_verl.tools.plan.request import DEFAULTS, of_run, plan_of

EXPERIMENTS = Path(flashrl_verl.__file__).parent / "configs" / "experiment"


def test_the_command_plans_a_run_by_its_overrides(tmp_path):
    out = tmp_path / "new" / "plan.json"
    words = ["plan", "experiment=dapo_qwen2.5_32b_int8", "flashrl.keep_first_layers=3", "--gpu", "h100"]
    words += ["--response-length", "3000", "--json", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    made = json.loads(out.read_text())
    assert sorted(key.rpartition(".")[2] for key in made["not_planned"]) == [
        "enable=True",  # algorithm.filter_groups
        "keep_first_layers=3",
        "optimizer_offload=True",
        "param_offload=True",
    ]
    assert "flashrl.keep_first_layers=3" in result.output
    assert (
        made["gpus"] == 32
        and made["engine"]["tensor_parallel"] == 4
        and made["engine"]["gpu_memory_utilization"] == 0.8
    )
    assert made["work"] == {"sequences": 1024, "prompt": 1024, "response": 3000}  # 512 prompts x 16 samples, 8 engines
    rows = [(row["choice"]["precision"], row["choice"]["kv_cache"]) for row in made["outcomes"]]
    assert rows == [(precision, kv) for kv in ("auto", "int8_per_token_head") for precision in ("bf16", "int8", "fp8")]
    assert all(len(line) <= 80 for line in result.output.splitlines())


def test_a_run_whose_model_is_not_known_is_told_of_model():
    words = ["plan", "experiment=dapo_qwen2.5_32b_int8", "actor_rollout_ref.model.path=a/b"]
    done = subprocess.run(
        [sys.executable, "-m", "flashrl_verl.cli", *words], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 1
    assert "--model" in done.stderr and "Traceback" not in done.stderr


def test_a_run_that_contradicts_itself_is_refused_as_by_the_recipe():
    result = CliRunner().invoke(app, ["plan", "experiment=dapo_qwen2.5_32b_int8", "flashrl.precision=int4"])
    assert (
        result.exit_code == 1
        and isinstance(result.exception, ConfigError)
        and "flashrl.precision" in str(result.exception)
    )


def test_a_plan_that_cannot_be_written_names_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["plan", "--model", "tiny", "--json", str(tmp_path / "file" / "plan.json")])
    assert isinstance(result.exception, ConfigError) and "--json" in str(result.exception)


def test_less_memory_than_the_data_sheets_can_be_named(tmp_path):
    out = tmp_path / "plan.json"
    CliRunner().invoke(app, ["plan", "--gpu", "h200", "--gpus", "1", "--gpu-memory-gib", "76", "--json", str(out)])
    assert json.loads(out.read_text())["gpu"]["memory_gib"] == 76


@pytest.mark.parametrize("name", sorted(path.stem for path in EXPERIMENTS.glob("*_*.yaml")))
def test_every_shipped_experiment_can_be_planned(name):
    run = of_run([f"experiment={name}"])
    assert run["model"] in SHAPES and run["samples"] > 1
    made = plan_of({**DEFAULTS, **run}, find("h200"))
    assert all(outcome.refused is None and outcome.whole.seconds > 0 for outcome in made.outcomes)
    engines = made.gpus // made.engine.tensor_parallel
    assert made.sequences == engines * -(-run["sequences"] // engines)


def test_responses_share_their_prompt_where_the_run_caches_prefixes():
    words = ["experiment=dapo_qwen2.5_7b_int8", "actor_rollout_ref.rollout.n=8"]
    assert of_run(words)["samples"] == 8
    assert of_run([*words, "actor_rollout_ref.rollout.enable_prefix_caching=false"])["samples"] == 1


def test_what_a_run_sets_and_the_plan_leaves_out_is_named():
    words = ["experiment=dapo_qwen2.5_32b_int8", "flashrl.kv_cache=int8_per_token_head"]
    assert "flashrl.keep_first_layers=2" in of_run([*words, "flashrl.keep_first_layers=2"])["not_planned"]
    assert not any(left.startswith("flashrl.") for left in of_run(words)["not_planned"])


def test_what_the_trainer_keeps_is_told_by_hand():
    """16 bytes for each of 32.76 billion parameters: 488.2 GiB, over two GPUs of 44."""
    said = " ".join(
        CliRunner().invoke(app, ["plan", "--gpu", "l40", "--gpus", "2", "--tensor-parallel", "2"]).output.split()
    )
    assert "are 244.1 GiB of each, more than its 44, unless" in said
    said = " ".join(CliRunner().invoke(app, ["plan", "--gpu", "h200", "--gpus", "64"]).output.split())
    assert "are 7.6 GiB of each, unless" in said
