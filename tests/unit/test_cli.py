# SPDX-License-Identifier: Apache-2.0
"""The command line, and the quickstart's handling of overrides, directories and processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import ConfigError
from flashrl_verl.quickstart import run
from flashrl_verl.quickstart.run import QuickstartConfig, check, training_overrides
from flashrl_verl.tools.process_tree import ProcessTree
from flashrl_verl.tools.recipe_process import ROOT, compose, quoted

# ---- commands ----

COMMANDS = ("quickstart", "report", "data", "plan", "check", "export", "eval", "version")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output


def flashrl(*words: str, before: str = "pass") -> subprocess.CompletedProcess:
    code = f"import sys; {before}; from flashrl_verl.cli import main; sys.argv = ['flashrl', *{words!r}]; main()"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400)


def test_bench_runs_the_checkouts_benchmarks():
    done = flashrl("bench", "rollout", "--help")
    assert done.returncode == 0 and "--workloads" in done.stdout


def test_without_matplotlib_a_report_is_printed_and_its_pictures_are_one_line_with_the_remedy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": {"rollout_corr/k3_kl": 1e-4}}))
    done = flashrl("report", str(tmp_path), before="sys.modules['matplotlib'] = None")
    assert done.returncode == 1 and "1.00e-04" in done.stdout and (tmp_path / "report.md").is_file()
    [said] = done.stderr.splitlines()
    assert said.startswith("FlashRLError: ") and "pip install 'matplotlib>=3.8'" in said


# ---- what the quickstart refuses before anything is made or moved ----


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--sede=3", "--sede=3"),
        ("precision", "'precision' is neither"),
        ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_p=0.9 is refused"),
        ("flashrl.precision=int4", "int4"),
        ("trainer.total_training_steps=null", "trainer.total_training_steps=null"),
        ("trainer.total_training_steps=six", "trainer.total_training_steps=six"),
        ("trainer.total_training_steps=0", "from 1 on"),
        ("data.train_files=no/such.parquet", "data.train_files=no/such.parquet not found"),
        ("trainer.no_such_key=1", "trainer.no_such_key"),
        ("trainer.default_local_dir={}/theirs", "/theirs is refused"),
        ("--output={}/out/metrics.jsonl", "metrics.jsonl is a file"),
        ("--output={}/out/metrics.jsonl/folder", "metrics.jsonl is a file"),
    ],
)
def test_a_refused_word_leaves_every_earlier_run_where_it_is(tmp_path, monkeypatch, word, said):
    monkeypatch.setattr(run, "make_assets", None)  # or what is not refused would be trained
    for folder in ("out", "theirs/global_step_5"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "out" / "metrics.jsonl").write_text("old")
    words = ["quickstart", "--output", f"{tmp_path}/out", "hardware=cpu", word.format(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, ConfigError) and said in str(result.exception)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["global_step_5", "metrics.jsonl", "out", "theirs"]


# ---- overrides ----


@pytest.mark.parametrize("folder", ["/plain", "/two words/it's=1", "/a=b,c", "/[x]{y}"])
def test_the_users_overrides_win_and_any_path_can_be_one(folder):
    words = ("experiment=smoke", "hardware=cpu", "data.seed=9", f"trainer.project_name={quoted(folder)}")
    cfg = compose(training_overrides(QuickstartConfig(output=Path(folder), overrides=words)))
    assert cfg.trainer.device == "cpu" and cfg.data.seed == 9 and cfg.trainer.project_name == folder
    assert cfg.data.train_files == f"{folder}/assets/train.parquet"
    assert cfg.trainer.default_local_dir == f"{folder}/checkpoints"


@pytest.mark.parametrize("given", ["console", "[console,file]", "null"])
def test_the_metrics_file_is_logged_whatever_loggers_are_chosen(tmp_path, given):
    words = ("hardware=cpu", f"trainer.logger={given}")
    overrides, composed = check(QuickstartConfig(output=tmp_path / "out", overrides=words))
    expected = [*(["console"] if "console" in given else []), "file"]
    assert list(composed.trainer.logger) == list(compose(overrides).trainer.logger) == expected


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
