# SPDX-License-Identifier: Apache-2.0
"""`flashrl plan` on the command line: a run's overrides, files, refusals."""

import json
import subprocess
import sys

from typer.testing import CliRunner

from flashrl_verl.bench.shapes import SHAPES
from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.plan.request import of_run


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
    assert made["gpus"] == 32 and made["engine"]["tensor_parallel"] == 4 and made["engine"]["gpu_memory_utilization"] == 0.8
    assert made["work"] == {"sequences": 1024, "prompt": 1024, "response": 3000}  # 512 prompts x 16 samples, 8 engines
    rows = [(row["choice"]["precision"], row["choice"]["kv_cache"]) for row in made["outcomes"]]
    assert rows == [(precision, kv) for kv in ("auto", "int8_per_token_head") for precision in ("bf16", "int8", "fp8")]
    assert all(len(line) <= 80 for line in result.output.splitlines())


def test_a_run_whose_model_is_not_known_is_told_of_model():
    words = ["plan", "experiment=dapo_qwen2.5_32b_int8", "actor_rollout_ref.model.path=a/b"]
    done = subprocess.run([sys.executable, "-m", "flashrl_verl.cli", *words], capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert "--model" in done.stderr and "Traceback" not in done.stderr


def test_a_run_that_contradicts_itself_is_refused_as_by_the_recipe():
    result = CliRunner().invoke(app, ["plan", "experiment=dapo_qwen2.5_32b_int8", "flashrl.precision=int4"])
    assert result.exit_code == 1 and isinstance(result.exception, ConfigError) and "flashrl.precision" in str(result.exception)


def test_a_plan_that_cannot_be_written_names_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["plan", "--model", "tiny", "--json", str(tmp_path / "file" / "plan.json")])
    assert isinstance(result.exception, ConfigError) and "--json" in str(result.exception)


def test_less_memory_than_the_data_sheets_can_be_named(tmp_path):
    out = tmp_path / "plan.json"
    CliRunner().invoke(app, ["plan", "--gpu", "h200", "--gpus", "1", "--gpu-memory-gib", "76", "--json", str(out)])
    assert json.loads(out.read_text())["gpu"]["memory_gib"] == 76


def test_every_shipped_experiment_of_a_known_model_can_be_planned():
    for name in ("dapo_qwen2.5_7b_int8", "dapo_qwen3_30b_a3b_int8", "gsm8k_qwen2.5_0.5b_int8", "dapo_qwen2.5_32b_fp8"):
        assert of_run([f"experiment={name}"])["model"] in SHAPES
