# SPDX-License-Identifier: Apache-2.0
"""An FP8 KV cache over sleep and waking, as between a run's steps. One engine a process: vLLM's sleep wants it so."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from kv_cache_sleep import distances
from large_values import ROUNDING

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "qwen3-moe"])
def test_after_sleep_an_update_and_waking_the_output_is_that_of_the_same_policy(family, tmp_path):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        seen = pool.submit(distances, tmp_path, family).result()
    assert len(seen.same) == 2 and max(seen.same) <= ROUNDING
    assert seen.forgotten > 1e-2, "scales that are not written again have to show"
