# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines with our attention over INT8 keys and values: CUDA graphs, prompts in pieces, prefix caching, sleep.

Engines read tokens by other kernels than they decode them with, which round differently. Where that changes a router's choice
of experts (a router of random weights has many near ties) a token's log-prob moves by tenths, so that the mean over tokens says
how many there were. Means over the nearest 95 % have one bound for all families, means over all another one for experts.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from int8_kv_cache import seen

pytestmark = pytest.mark.gpu

NOISE = 1e-4
"""Mean k3 of what differs by rounding alone."""


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3", "llama3", "qwen3-moe"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(family, tmp_path_factory):
    """What was seen of an engine in a process of its own, as vLLM's sleep wants it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(seen, tmp_path_factory.mktemp("model"), family, "int8_per_token_head").result()


@pytest.fixture(scope="module")
def other(family, tmp_path_factory):
    """The same with a BF16 cache."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(seen, tmp_path_factory.mktemp("model"), family, "auto").result()


def test_every_attention_layer_is_ours_and_int8(engine):
    assert engine.backends == {"CUSTOM"} and engine.dtypes == {"torch.int8"}


@pytest.fixture
def alike(family):
    """Whether a distance is that of one policy."""
    return lambda distance: 0 < distance.most < NOISE and distance.mean < (1e-3 if "moe" in family else NOISE)


def test_it_is_as_near_the_trainer_as_with_a_bf16_cache(engine, other, record_property):
    record_property("k3 to the trainer: INT8 keys and values, BF16", (engine.to_trainer, other.to_trainer))
    assert other.backends != engine.backends
    assert 0 < engine.to_trainer.mean <= other.to_trainer.mean + 2e-4


def test_a_token_that_is_decoded_has_the_log_prob_of_one_that_is_read(engine, other, alike, record_property):
    record_property("k3 of decoding to reading: INT8 keys and values, BF16", (engine.decoded_to_read, other.decoded_to_read))
    assert engine.responses > 100 and alike(engine.decoded_to_read)


def test_a_prompt_that_lies_in_the_prefix_cache_is_answered_alike(engine):
    assert engine.cached_tokens > 0 and engine.cached_to_fresh.mean < NOISE


def test_after_an_update_and_sleep_it_is_the_new_policy(engine, other, alike, record_property):
    record_property("the same after sleep", (engine.decoded_after_sleep, other.decoded_after_sleep))
    assert engine.after_update.mean < NOISE < engine.before_update.most
    assert alike(engine.decoded_after_sleep)
