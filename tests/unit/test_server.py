# SPDX-License-Identifier: Apache-2.0
"""vLLM's arguments: CUDA graphs are captured for as many sequences as may run, and what the user sets wins."""

import pytest

from flashrl_verl import attention
from flashrl_verl.rollout import server
from flashrl_verl.rollout.server import FlashRLHttpServer
from flashrl_verl.settings import FlashRLConfig, KVCache
from flashrl_verl.tools.recipe_process import compose


@pytest.mark.parametrize(
    ("device", "words", "chosen", "largest"),
    [
        ("cuda", ["max_num_seqs=1024"], {}, 1024),
        ("cuda", ["max_num_seqs=512"], {}, None),  # vLLM's own
        ("cpu", ["max_num_seqs=1024"], {}, None),
        ("cuda", ["max_num_seqs=1000"], {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, 1008),
        ("cuda", ["max_num_seqs=256"], {"max_num_seqs": 600}, 608),
        ("cuda", ["max_num_seqs=1024"], {"max_cudagraph_capture_size": 600}, 600),
        ("cuda", ["max_num_seqs=1024"], {"compilation_config": '{"cudagraph_capture_sizes": [8]}'}, None),
        ("cuda", ["max_num_seqs=1024"], {"speculative_config": {"method": "ngram"}}, None),
        ("cuda", ["max_num_seqs=1024", "cudagraph_capture_sizes=[8]"], {}, None),
    ],
)
def test_cuda_graphs_are_captured_for_as_many_sequences_as_may_run(monkeypatch, device, words, chosen, largest):
    monkeypatch.setattr(server, "vllm_device", lambda: device)
    engine = object.__new__(FlashRLHttpServer)
    composed = compose(["experiment=smoke", *(f"actor_rollout_ref.rollout.{word}" for word in words)])
    engine.config, engine.flashrl = composed.actor_rollout_ref.rollout, FlashRLConfig()
    engine._preprocess_engine_kwargs(arguments := dict(chosen))
    assert arguments.get("max_cudagraph_capture_size") == largest
    assert chosen.items() <= arguments.items()


def test_an_argument_that_is_written_as_on_vllms_command_line_is_the_users_too(monkeypatch):
    monkeypatch.setattr(server, "vllm_device", lambda: "cuda")
    engine = object.__new__(FlashRLHttpServer)
    engine.config = compose(["experiment=smoke"]).actor_rollout_ref.rollout
    engine.flashrl = FlashRLConfig(kv_cache="int8_per_token_head")
    engine._preprocess_engine_kwargs(arguments := {"attention-backend": "TRITON_ATTN", "max-num-seqs": 600})
    assert arguments["attention_backend"] == "TRITON_ATTN" and arguments["max_cudagraph_capture_size"] == 608
    assert not any("-" in name for name in arguments)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, {"cudagraph_mode": "FULL"}),
        (
            {"compilation_config": '{"cudagraph_capture_sizes": [8]}'},
            {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [8]},
        ),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, {"cudagraph_mode": "NONE"}),
        ({"attention_backend": "custom"}, {"cudagraph_mode": "FULL"}),
        ({"attention_config": {"backend": "TRITON_ATTN"}}, None),
        ({"attention_config": '{"backend": "TRITON_ATTN"}'}, None),
        ({"attention_backend": "TRITON_ATTN"}, None),
    ],
)
def test_our_attention_has_a_cuda_graph_for_every_batch_and_another_has_vllms(monkeypatch, given, mode):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(attention, "register_attention", lambda: None)
    monkeypatch.setattr(attention, "graphs_hold_prompts", lambda: True)
    arguments = attention.kv_cache_arguments(KVCache.INT8_PER_TOKEN_HEAD, given)
    assert arguments.get("compilation_config") == mode and arguments["kv_cache_dtype"] == "int8_per_token_head"
    assert (str(arguments.get("attention_backend")).upper() == "CUSTOM") == (mode is not None)
    assert attention.kv_cache_arguments(KVCache.AUTO, given) == {"kv_cache_dtype": "auto", **given}
