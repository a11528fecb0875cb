# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with our attention over INT8 keys and values: CUDA graphs, prompts in pieces, prefix caching,
sleep."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from int8_kv_cache import seen

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3", "llama3", "qwen3-moe"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(family, tmp_path_factory):
    """What was seen of an engine in a process of its own, as vLLM's sleep wants it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(seen, tmp_path_factory.mktemp("model"), family, "int8_per_token_head").result()


def test_every_attention_layer_is_ours_and_int8(engine):
    assert engine.backends == {"CUSTOM"} and engine.dtypes == {"torch.int8"}


def test_it_is_as_near_the_trainer_as_with_a_bf16_cache(engine, family, tmp_path, record_property):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        other = pool.submit(seen, tmp_path, family, "auto").result()
    record_property("k3 to the trainer: INT8 keys and values, BF16", (engine.to_trainer, other.to_trainer))
    assert other.backends != engine.backends
    assert 0 < engine.to_trainer <= other.to_trainer + 2e-4


def test_a_token_that_is_decoded_has_the_log_prob_of_one_that_is_read(engine):
    assert engine.responses > 100 and 0 < engine.decoded_to_read < 1e-4


def test_a_prompt_that_lies_in_the_prefix_cache_is_answered_alike(engine):
    assert engine.fresh_tokens == 0 < engine.cached_tokens and engine.cached_to_fresh < 1e-4


def test_after_an_update_and_sleep_it_is_the_new_policy(engine):
    assert engine.after_update < 1e-4 < engine.before_update
    assert 0 < engine.decoded_after_sleep < 1e-4
