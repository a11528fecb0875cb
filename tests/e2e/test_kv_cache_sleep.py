# SPDX-License-Identifier: Apache-2.0
"""An FP8 KV cache over sleep and waking, as between a run's steps. In a file of its own: one engine of a process can sleep."""

import pytest
import torch
from engines import Refit, teacher_forced
from engines import engine as start_engine
from large_values import ROUNDING, distance, enlarged
from tiny_models import VOCAB, make, wire

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "qwen3-moe"])
def test_after_sleep_an_update_and_waking_the_output_is_that_of_the_same_policy(family, tmp_path):
    weights = wire(make(family, seed=5))
    make(family).config.save_pretrained(tmp_path)
    sequences = torch.randint(3, VOCAB, (16, 40), generator=torch.Generator().manual_seed(1)).tolist()
    settings = {"precision": "int8", "kv_cache": "fp8"}
    with start_engine(tmp_path, settings, compiled=True, enable_sleep_mode=True) as llm:
        refit = Refit(llm)
        refit(weights, step=0)
        reference = teacher_forced(llm, sequences)
        for step in (1, 2):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            refit(enlarged(weights), step=step)
            llm.wake_up(tags=["kv_cache"])
            refit.account.kv_scales.restore()  # as the server does, after the same calls
            refit.account.kv_scales.live()
            assert distance(llm, sequences, reference) <= ROUNDING
