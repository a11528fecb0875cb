# SPDX-License-Identifier: Apache-2.0
"""Runs of ``flashrl bench learning`` as its tests make them: a configuration, and files in a run's folder."""

import json

from flashrl_verl.bench.learning import LearningConfig, arms_of

KEY = "val-core/toy_chain/acc/mean@4"


def config(folder, **more) -> LearningConfig:
    """Two arms, two seeds, four steps, on the CPU."""
    settings = dict(
        output=folder, arms=arms_of("bf16:none,int8:tis"), seeds=(0, 1), steps=4, parallel=2, minutes=10.0, hardware="cpu",
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
