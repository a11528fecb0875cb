# SPDX-License-Identifier: Apache-2.0
"""Which models our attention takes, and how a batch's prompts are put together."""

import math

import pytest
import torch
from refusals import ENGINE, changed, refusal

from flashrl_verl.attention import pages
from flashrl_verl.attention.limits import why_not_model
from flashrl_verl.attention.metadata import prefills_of
from flashrl_verl.settings import KVCache
from flashrl_verl.tools.engines.shapes import load_config
from flashrl_verl.validation import validate_config


def test_a_page_is_the_same_bytes_in_the_caches_of_both_kinds_of_vllm():
    count, slots, heads, size = 3, 16, 2, 32
    whole = pages.shape(count, slots, heads, size)
    cache = torch.arange(math.prod(whole)).to(torch.int8).view(whole)
    wider = torch.zeros(count, cache[0].numel() + 64, dtype=torch.int8)  # vLLM pads pages of unequal layers
    wider[:, : cache[0].numel()] = cache.flatten(1)
    since_029 = wider.as_strided((count, heads, slots, 2 * (size + 4)), (wider.stride(0), slots * 72, 72, 1))
    assert pages.geometry(cache) == pages.geometry(since_029) == (heads, slots, size)
    for page in range(count):
        assert torch.equal(cache[page].flatten(), since_029[page].flatten())


WINDOW = "a sliding window of 9 tokens"


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("qwen2.5-0.5b", {}, None),
        ("qwen2.5-32b", {}, None),
        ("qwen3-30b-a3b", {}, None),
        ("qwen2.5-0.5b", {"head_dim": 96}, "heads of 96 elements (those of 32, 64, 128, 256 are taken)"),
        ("qwen2.5-0.5b", {"num_attention_heads": 66, "head_dim": 64}, "33 query heads a KV head (up to 32 are taken)"),
        ("qwen2.5-0.5b", {"use_sliding_window": True, "sliding_window": 9, "layer_types": None}, WINDOW),
        ("qwen3-30b-a3b", {"layer_types": ["sliding_attention"], "sliding_window": 9}, WINDOW),
        ("qwen2.5-0.5b", {"use_sliding_window": False, "sliding_window": 9, "layer_types": None}, None),
        ("qwen3-30b-a3b", {"layer_types": ["full_attention"], "sliding_window": 9}, None),
        # Left to the engine: config.json does not say.
        ("qwen2.5-0.5b", {"head_dim": None, "hidden_size": None}, None),
        ("qwen2.5-0.5b", {"head_dim": None, "num_attention_heads": 0}, None),
    ],
)
def test_a_model_is_taken_or_refused_in_numbers(name, change, reason):
    config = {**load_config(name).to_dict(), **change}
    assert why_not_model(config) == reason


def test_a_model_with_other_heads_is_refused_when_the_run_is_composed_unless_it_has_another_attention(tmp_path):
    config = load_config("qwen2.5-0.5b")
    config.head_dim = 96
    config.save_pretrained(tmp_path)

    def run(kv_cache="int8_per_token_head", **engine):
        keys = {"actor_rollout_ref.model.path": str(tmp_path), "flashrl.kv_cache": kv_cache}
        return changed({**keys, **{f"{ENGINE}.{key}": value for key, value in engine.items()}})

    message = refusal(run())
    assert "heads of 96" in message and "attention_backend=TRITON_ATTN" in message
    assert "heads of 96" in refusal(run(attention_config={"flash_attn_version": 2})), "no backend named: it is ours"
    assert validate_config(run(attention_backend="TRITON_ATTN")).kv_cache is KVCache.INT8_PER_TOKEN_HEAD
    validate_config(run(attention_config={"backend": "TRITON_ATTN"}))
    validate_config(run(kv_cache="auto"))


def groups(lengths, new, first, at_once):
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    return prefills_of(starts, lengths, first, at_once, lambda numbers: torch.tensor(numbers, dtype=torch.int32))


def test_prompts_are_read_together_up_to_a_number_of_tokens():
    found = groups([9, 30, 50, 20, 20, 90], [1, 1, 5, 20, 1, 90], first=2, at_once=75)
    assert [(p.rows, p.tokens) for p in found] == [
        (slice(2, 4), slice(2, 27)),
        (slice(4, 5), slice(27, 28)),
        (slice(5, 6), slice(28, 118)),
    ]
    assert [(p.max_query_len, p.max_seq_len, p.total) for p in found] == [(20, 50, 70), (1, 20, 20), (90, 90, 90)]
    assert found[0].query_starts.tolist() == [0, 5, 25] and found[0].key_starts.tolist() == [0, 50, 70]
    assert groups([7, 0, 0], [1, 0, 0], first=1, at_once=100) == [], "rows that pad a batch are not read"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given, said",
    [
        ({"alibi_slopes": [0.5]}, "no ALiBi"),
        ({"sliding_window": 4096}, "no sliding window"),
        ({"logits_soft_cap": 30.0}, "no cap on logits"),
    ],
)
def test_layers_of_another_kind_are_refused_with_a_remedy(given, said):
    from flashrl_verl.attention.backend import Int8KVAttention
    from flashrl_verl.attention.limits import REMEDY

    with pytest.raises(ValueError, match=f"flashrl.kv_cache=int8_per_token_head: its attention has {said}") as refused:
        Int8KVAttention(8, 128, 128**-0.5, 4, **given)
    assert REMEDY in str(refused.value)
