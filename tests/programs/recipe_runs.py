# SPDX-License-Identifier: Apache-2.0
"""End-to-end tests run the recipe as a user does: a process, a Hydra command line, a metrics file."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashrl_verl.tools.log_excerpt import last_error

PROGRAMS = Path(__file__).parent
ROOT = PROGRAMS.parents[1]
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

TWO_RANKS = (
    "trainer.n_gpus_per_node=2",
    # Half of 4 prompts x 4 samples.
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
)
"""The smoke experiment on two trainer ranks and one engine of two ranks."""


@dataclasses.dataclass
class Run:
    """A finished run of the recipe."""

    returncode: int
    output: str
    metrics_file: Path

    @property
    def failure(self) -> str:
        """For a test's message: the error that ended it, and the end of the log."""
        return "\n".join([*last_error(self.output), "...", self.output[-4000:]])

    def metrics(self) -> dict[int, dict]:
        """step -> metrics, later lines of a step merged over earlier ones."""
        steps: dict[int, dict] = {}
        for line in self.metrics_file.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {}).update(entry["data"])
        return steps


def make_assets(folder: Path, *, moe: bool = False, **sizes: int) -> Path:
    """An untrained toy model with its tokenizer and data, in the layout of the quickstart experiment.

    Args:
        folder: where they go.
        moe: make it a Qwen3-MoE of ``tiny_models``'s sizes.
        **sizes: of ``build_model``.
    """
    import datasets
    import tiny_models
    import torch

    from flashrl_verl.quickstart.model import build_model
    from flashrl_verl.quickstart.task import split_problems, verl_rows
    from flashrl_verl.quickstart.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    if moe:
        special = dict(bos_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
        model = tiny_models.make(
            "qwen3-moe", seed=3, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **special
        )
    else:
        model = build_model(tokenizer, seed=3, **sizes)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    split = split_problems(3)
    for name, problems in (("train", split.train[:64]), ("test", split.test[:8])):
        datasets.Dataset.from_list(verl_rows(problems, split=name)).to_parquet(folder / f"{name}.parquet")
    return folder


def command(assets: Path, folder: Path, *overrides: str) -> list[str]:
    """The recipe's smoke experiment on ``assets``, writing under ``folder``."""
    return [
        *(sys.executable, "-m", "recipe.flashrl.main_flashrl", "experiment=smoke"),
        f"quickstart.assets={assets}",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"reward.custom_reward_function.path={PROGRAMS}/digit_reward.py",
        "reward.custom_reward_function.name=share_of_digits",
        *overrides,
    ]


def environment(folder: Path, fault: str | None = None) -> dict[str, str]:
    env = dict(os.environ, HF_HUB_OFFLINE="1", RAY_USAGE_STATS_ENABLED="0", VLLM_NO_USAGE_STATS="1")
    env["VERL_FILE_LOGGER_PATH"] = str(folder / "metrics.jsonl")
    env.pop("VERL_PLATFORM", None)  # the recipe sets it from the configuration
    if fault:
        path = [str(PROGRAMS), *filter(None, [env.get("PYTHONPATH")])]
        env.update(VERL_USE_EXTERNAL_MODULES="flashrl_faults", FLASHRL_TEST_FAULT=fault, PYTHONPATH=":".join(path))
        env["FLASHRL_TEST_FIRED"] = str(folder / "fired")
    return env


def start(
    words: list[str],
    folder: Path,
    *,
    fault: str | None = None,
    cwd: Path = ROOT,
    variables: dict[str, str] | None = None,
) -> subprocess.Popen:
    """Start a run in a process group of its own; its output goes to ``folder/log``."""
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(
            words, cwd=cwd, env={**environment(folder, fault), **(variables or {})}, stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def finish(process: subprocess.Popen, folder: Path, timeout: float = 900) -> Run:
    """Wait for a run; end its process group when it takes too long."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        tail = (folder / "log").read_text(errors="replace")[-3000:]
        pytest.fail(f"the run did not end within {timeout} s:\n{tail}")
    output = _ANSI.sub("", (folder / "log").read_text(errors="replace"))
    return Run(process.returncode, output, folder / "metrics.jsonl")
