# SPDX-License-Identifier: Apache-2.0
"""The command line, and the quickstart's handling of overrides, directories and processes."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flashrl_verl import __version__
from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart import run as quickstart
from flashrl_verl.quickstart.assets import Assets
from flashrl_verl.quickstart.run import QuickstartConfig, check, how_to_go_on, training_overrides
from flashrl_verl.quickstart.warmup import Accuracy
from flashrl_verl.settings import Precision
from flashrl_verl.tools.process_tree import ProcessTree
from flashrl_verl.tools.progress import Display
from flashrl_verl.tools.recipe_process import compose, quoted

ROOT = Path(__file__).resolve().parents[2]


def flashrl(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "flashrl_verl.cli", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)


# ---- commands ----


COMMANDS = ("quickstart", "report", "data", "plan", "check", "export", "eval", "version")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output


def test_bench_runs_the_checkouts_benchmarks():
    done = flashrl("bench", "rollout", "--help")
    assert done.returncode == 0 and "python -m benchmarks rollout" in done.stdout


def test_importing_the_command_line_imports_nothing_heavy():
    heavy = ("torch", "verl", "vllm", "ray", "transformers", "matplotlib", "hydra", "psutil")
    code = f"import sys, flashrl_verl.cli; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_version_names_every_component():
    result = CliRunner().invoke(app, ["version"])
    assert result.exit_code == 0 and result.output.startswith(f"flashrl-verl {__version__}\n")
    for name in ("verl", "vllm", "torch", "ray"):
        assert f"\n{name} " in result.output


def test_report_prints_and_writes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": {"rollout_corr/k3_kl": 1e-4}}))
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0 and "1.00e-04" in result.output
    assert (tmp_path / "report.md").is_file() and (tmp_path / "curves.png").is_file()


def test_a_users_mistake_is_one_line_not_a_traceback(tmp_path):
    result = flashrl("report", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("FlashRLError: ") and "Traceback" not in result.stderr


@pytest.mark.parametrize("word", ["--sede=3", "precision"])
def test_a_mistyped_word_is_refused_before_anything_is_made(tmp_path, word):
    result = CliRunner().invoke(app, ["quickstart", "--output", str(tmp_path / "out"), word])
    assert isinstance(result.exception, ConfigError) and word in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_report_is_one_line_with_the_remedy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": {"rollout_corr/k3_kl": 1e-4}}))
    code = (
        "import sys; sys.modules['matplotlib'] = None; from flashrl_verl.cli import main; "
        f"sys.argv = ['flashrl', 'report', {str(tmp_path)!r}]; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "1.00e-04" in result.stdout and (tmp_path / "report.md").is_file()
    [said] = result.stderr.splitlines()
    assert said.startswith("FlashRLError: ") and "pip install 'matplotlib>=3.8'" in said


# ---- what is told while it runs ----


def test_the_warm_up_is_announced_before_it_begins_and_told_of_without_a_terminal(tmp_path, monkeypatch):
    said, out = [], io.StringIO()

    def make(root, config, *, on_probe):  # the warm-up itself is tested in test_toy.py; here it takes no time
        said.append(out.getvalue())
        on_probe(10, Accuracy(greedy=0.2, sampled=0.1))
        later = time.monotonic() + 60
        monkeypatch.setattr(time, "monotonic", lambda: later)
        on_probe(20, Accuracy(greedy=0.4, sampled=0.3))
        made = {"parameters": 5, "warmup_steps": 20, "warmup_seconds": 60.0, "test": {"greedy": 0.4, "sampled": 0.3}}
        return Assets(root=root, made=made, reused=False)

    monkeypatch.setattr(quickstart, "make_assets", make)
    quickstart._assets(QuickstartConfig(output=tmp_path), Precision.INT8, Console(file=out, width=200))
    [before], told = said, out.getvalue()
    assert before.startswith("toy model: supervised warm-up") and str(tmp_path / "assets") in before
    assert "update 20, accuracy 0.30" in told and "update 10" not in told


# ---- overrides ----


def test_the_users_overrides_come_last_and_win():
    words = ("hardware=cpu", "trainer.total_training_steps=3", "data.seed=9", "flashrl.precision=bf16")
    cfg = compose(training_overrides(QuickstartConfig(output=Path("/a b/it's=1"), overrides=words)))
    assert cfg.trainer.device == "cpu" and cfg.trainer.total_training_steps == 3
    assert cfg.data.seed == 9 and cfg.flashrl.precision == "bf16"
    assert cfg.data.train_files == "/a b/it's=1/assets/train.parquet"
    assert cfg.trainer.default_local_dir == "/a b/it's=1/checkpoints"


def test_hardware_and_experiment_are_chosen_only_when_the_user_did_not():
    chosen = training_overrides(QuickstartConfig(output=Path("/x")))
    assert chosen[0] == "experiment=quickstart" and chosen[1] in ("hardware=cpu", "hardware=cuda")
    own = training_overrides(QuickstartConfig(output=Path("/x"), overrides=("experiment=smoke", "hardware=cuda")))
    assert [w for w in own if w.startswith(("experiment=", "hardware="))] == [
        "experiment=smoke",
        "hardware=cuda",
    ]


@pytest.mark.parametrize("given", ["[console]", "console", "[]", "[console,file]", "null"])
def test_the_metrics_file_is_logged_whatever_loggers_are_chosen(tmp_path, given):
    words = ("hardware=cpu", f"trainer.logger={given}")
    overrides, composed = check(QuickstartConfig(output=tmp_path / "out", overrides=words))
    assert "file" in composed.trainer.logger and "file" in compose(overrides).trainer.logger
    assert list(composed.trainer.logger) == [*(["console"] if "console" in given else []), "file"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_p=0.9 is refused"),
        ("flashrl.precision=int4", "int4"),
        ("trainer.total_training_steps=null", "trainer.total_training_steps=null"),
        ("trainer.total_training_steps=six", "trainer.total_training_steps=six"),
        ("trainer.total_training_steps=0", "from 1 on"),
        ("data.train_files=no/such.parquet", "data.train_files=no/such.parquet not found"),
        ("trainer.no_such_key=1", "trainer.no_such_key"),
    ],
)
def test_a_refused_override_leaves_the_earlier_run_where_it_is(tmp_path, word, said):
    (tmp_path / "metrics.jsonl").write_text("old")
    result = CliRunner().invoke(app, ["quickstart", "--output", str(tmp_path), "hardware=cpu", word])
    assert isinstance(result.exception, ConfigError) and said in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_another_runs_checkpoints_stay_where_they_are_and_nothing_is_made(tmp_path):
    (tmp_path / "theirs" / "global_step_5").mkdir(parents=True)
    word = f"trainer.default_local_dir={tmp_path}/theirs"
    result = CliRunner().invoke(app, ["quickstart", "--output", f"{tmp_path}/out", "hardware=cpu", word])
    assert isinstance(result.exception, ConfigError) and f"{word} is refused" in str(result.exception)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["global_step_5", "theirs"]


@pytest.mark.parametrize("below", ["", "/folder"])
def test_an_output_that_is_a_file_is_one_error(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    result = CliRunner().invoke(app, ["quickstart", "--output", f"{tmp_path}/file{below}"])
    assert isinstance(result.exception, ConfigError) and f"{tmp_path}/file is a file" in str(result.exception)


@pytest.mark.parametrize("text", ["plain", "two words", "it's", "a=b,c", "[x]{y}"])
def test_any_path_can_be_an_override(text):
    cfg = compose(["experiment=quickstart", f"trainer.default_local_dir={quoted(text)}"])
    assert cfg.trainer.default_local_dir == text


def test_a_run_that_ended_early_says_whether_it_can_be_resumed(tmp_path):
    words = ("hardware=cpu", "trainer.save_freq=5")
    default, saving = (check(QuickstartConfig(output=tmp_path, overrides=w))[1] for w in (words[:1], words))
    assert "trainer.save_freq=-1 saves none, trainer.save_freq=10" in how_to_go_on(default)
    assert how_to_go_on(saving) == "No checkpoint was saved, so this run cannot be resumed."
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    assert how_to_go_on(saving).startswith("Checkpoint of step 5: ") and "--resume" in how_to_go_on(saving)


# ---- process tree ----

# A parent that ends at Ctrl-C and leaves a child which ignores it, as an engine's worker may.
STUBBORN = """
import subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
block = bytearray(64 * 2**20)
time.sleep(600)
"""


def test_ending_a_training_leaves_no_process_behind(tmp_path):
    tree = ProcessTree([sys.executable, "-c", STUBBORN], tmp_path / "log", dict(os.environ), ROOT)
    try:
        root, deadline = psutil.Process(tree._process.pid), time.monotonic() + 200
        while "up" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert tree.poll() is None
        [child] = root.children()
        assert tree.peak_bytes > 64 * 2**20
    finally:
        tree.end(((2, 1.0), (15, 5.0), (9, 5.0)))
    # A zombie has ended too: it waits for whoever adopted it to take note.
    assert all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in (root, child))


def test_the_exit_code_of_the_training_is_seen(tmp_path):
    words = [sys.executable, "-c", "print('words'); raise SystemExit(3)"]
    tree = ProcessTree(words, tmp_path / "log", dict(os.environ), ROOT)
    deadline = time.monotonic() + 200
    while (code := tree.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert code == 3 and (tmp_path / "log").read_text() == "words\n"
    tree.end()


# ---- display ----


def test_without_a_terminal_each_step_is_one_line(tmp_path):
    log, metrics, out = tmp_path / "log", tmp_path / "metrics.jsonl", io.StringIO()
    log.write_text("Started a local Ray instance.\n")
    with Display(Console(file=out, width=200), 2, log, metrics) as display:
        display._spoke -= 60  # nothing was said for a minute
        display.update()
        metrics.write_text(json.dumps({"step": 0, "data": {"val-core/toy_addition/acc/mean@1": 0.45}}) + "\n")
        display.update()
        with metrics.open("a") as file:
            data = {"critic/score/mean": 0.5, "rollout_corr/k3_kl": 1e-4}
            file.write(json.dumps({"step": 1, "data": data}) + '\n{"step": 2, "da')
        display.first_line -= 240
        display.update()
        display.update()
        display._spoke -= 60  # a minute passes without news
        display._news -= 60
        display.first_line -= 60
        display.update()
    assert out.getvalue().splitlines() == [
        "start-up: starting Ray",
        "step 0/2: held-out 0.450",
        "step 1/2: held-out 0.450 (step 0), score (kept groups) 0.50, mismatch KL 1.0e-04, about 4 min left",
        "step 1/2: step 2 is running, about 3 min left",
    ]
    assert display.first_line is not None
