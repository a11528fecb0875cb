# SPDX-License-Identifier: Apache-2.0
"""What to call measurements of ``flashrl bench rollout``: by what tells their files apart."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def names(runs: Collection[Path]) -> dict[Path, str]:
    """A name for each of several result files: their paths without what they share, whole folders at the end, whole words at
    the start. ``throughput/7b.jsonl`` and ``throughput/again/7b.jsonl`` are called throughput and throughput/again.

    Args:
        runs: Absolute paths, all different.
    """
    from flashrl_verl.bench.rollout import RESULTS

    called = {run: run.parent if run.name == RESULTS else run.with_suffix("") for run in runs}
    if len(set(called.values())) < len(called):  # a/run.jsonl and a/run/rollout.jsonl
        called = {run: run for run in runs}
    while len(called) > 1 and len({path.name for path in called.values()}) == 1:
        called = {run: path.parent for run, path in called.items()}
    shared = os.path.commonprefix([*map(str, called.values())])
    start = max(shared.rfind(mark) for mark in "/-_") + 1  # words that all begin with tell nothing apart
    return {run: str(path)[start:] for run, path in called.items()}
