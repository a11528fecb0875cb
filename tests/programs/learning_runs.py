# SPDX-License-Identifier: Apache-2.0
"""Runs of ``flashrl bench learning`` as its tests make them: a configuration, files in a run's folder, runs that only
count."""

import json
import sys
import time
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.legacy_learning.learning import LearningConfig, arms_of
from benchmarks.legacy_learning.learning_schedule import Limits, Schedule

KEY = "val-core/toy_chain/acc/mean@2"


def config(folder, **more) -> LearningConfig:
    """Two arms, two seeds, four steps, on the CPU."""
    settings = dict(
        output=folder, arms=arms_of("bf16:none,int8:tis"), seeds=(0, 1), steps=4, parallel=2, minutes=10.0,
        hardware="cpu",
        kv_cache_gib=2.0,
    )  # fmt: skip
    return LearningConfig(**{**settings, **more})


def write_metrics(run, rows) -> None:
    """A metrics file: step to what was logged there."""
    run.folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "data": data}) for step, data in rows.items()]
    (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def write_record(run, *attempts) -> None:
    """A record with these attempts."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "run.json").write_text(json.dumps({"attempts": attempts}))


PROGRAM = Path(__file__).with_name("counting_run.py")
STEPS = 4


def limits(**more) -> Limits:
    waits = dict(first_s=60.0, between_s=60.0, stagger_s=0.0, start_s=0.0, ending_s=0.0, poll_s=0.02)
    return Limits(**{**dict(parallel=2, seconds=60), **waits, **more})


class Seen:
    """News, and how many ran at each look."""

    def __init__(self):
        self.news, self.looks, self.most, self.starts = [], [], 0, []

    def tell(self, news):
        self.news.append((news.state.run.name, news.event))

    def watch(self, running):
        self.most = max(self.most, len(running))

    def of(self, event):
        return [name for name, seen in self.news if seen is event]


def carry_out(runs, bounds, seconds="0.01", fails=None, retry=False) -> Seen:
    """Schedule runs that count; ``fails`` has the words after the seconds by name of a run."""
    seen, fails = Seen(), fails or {}

    def prepare(run):
        seen.starts.append(time.monotonic())  # what follows takes as long as the machine is busy
        words = [sys.executable, str(PROGRAM), str(run.folder), str(STEPS), seconds, *fails.get(run.name, ["0"])]
        return words, {"seed": run.seed}, OmegaConf.create({})

    Schedule(runs, STEPS, bounds, prepare, seen.tell, seen.watch, retry=retry).carry_out()
    return seen
