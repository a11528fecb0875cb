# SPDX-License-Identifier: Apache-2.0
"""Twenty weight updates of one compiled engine: it samples as one that never saw another policy, and nothing moves or
grows.

On a GPU the engine has CUDA graphs, and sleeps at level 2 before every update, as in training; a CPU has torch.compile
only.
"""

import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from engines import CUDA
from many_updates import PROMPTS, course

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

SETTLED = 5
"""Update after which nothing may grow any more: lazily made buffers and primitives exist by then."""

GROWTH = 1 << 20
"""Bytes a CPU process may grow from then to the last update. Seen: under 50 kB either way. A fifteenth of it, 70 kB an
update, is half a percent of the codes."""


def fresh_outputs(path: Path, precision: str) -> list:
    """What an engine of another process samples, that vLLM has loaded from ``path``."""
    words = [sys.executable, str(Path(__file__).parents[1] / "programs" / "fresh_engine.py")]
    done = subprocess.run(
        [*words, str(path), precision, json.dumps(PROMPTS)], capture_output=True, text=True, timeout=800, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line, done.stdout[-2000:] + done.stderr[-4000:]
    return [tuple(pair) for pair in json.loads(line.removeprefix("RESULT "))]


@pytest.mark.parametrize("precision", ["int8", pytest.param("fp8", marks=pytest.mark.gpu)])
def test_after_twenty_updates_the_engine_samples_as_one_loaded_with_the_last_weights(
    tmp_path, precision, record_property
):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        seen = pool.submit(course, tmp_path, precision).result()
    assert min(seen.code_change_rates[1:]) > 0.01, "updates that change nothing would make this test empty"
    assert all(before != after for before, after in zip(seen.outputs, seen.outputs[1:], strict=False))
    growth = [size - seen.sizes[SETTLED - 1] for size in seen.sizes]
    record_property("bytes after each update, against the fifth", growth)
    assert growth[-1] == 0 if CUDA else growth[-1] < GROWTH
    assert seen.outputs[-1] == fresh_outputs(tmp_path, precision)
