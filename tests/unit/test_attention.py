# SPDX-License-Identifier: Apache-2.0
"""Which models our attention takes, and how a batch's prompts are put together."""

import pytest
import torch
from refusals import ROLLOUT, changed, refusal

from flashrl_verl.attention.limits import why_not, why_not_model
from flashrl_verl.attention.metadata import prefills_of
from flashrl_verl.settings import KVCache
from flashrl_verl.tools.engines.shapes import load_config, save_config
from flashrl_verl.tools.plan import gpus
from flashrl_verl.tools.plan.memory import Engine
from flashrl_verl.tools.plan.planner import make_plan
from flashrl_verl.tools.plan.schedule import Work
from flashrl_verl.tools.plan.shape import shape_of
from flashrl_verl.validation import validate_config

MODEL = "actor_rollout_ref.model.path"
BACKEND = f"+{ROLLOUT}.engine_kwargs.vllm.attention_backend"


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-30b-a3b"])
def test_known_models_are_taken(name):
    assert why_not_model(load_config(name).to_dict()) is None


def test_what_is_not_taken_is_told_in_numbers():
    assert why_not(96, 32, 32) == "heads of 96 elements (those of 32, 64, 128, 256 are taken)"
    assert why_not(128, 66, 2) == "33 query heads a KV head (up to 32 are taken)" and why_not(128, 64, 2) is None


@pytest.mark.parametrize(
    "change", [{"head_dim": None, "num_attention_heads": "8"}, {"hidden_size": None}, {"num_attention_heads": 0}]
)
def test_what_config_json_does_not_say_is_left_to_the_engine(change):
    config = {**load_config("qwen2.5-0.5b").to_dict(), "head_dim": None, **change}
    assert why_not_model(config) is None


def run(folder, **keys):
    config = load_config("qwen2.5-0.5b")
    config.num_attention_heads = config.num_key_value_heads = 28  # of 32 elements
    config.head_dim = 96
    save_config(config, folder)
    wanted = {MODEL: str(folder), "flashrl.kv_cache": "int8_per_token_head", "flashrl.precision": "int8"}
    return changed({**wanted, **keys})


def test_such_a_model_is_refused_when_the_run_is_composed_unless_it_has_another_attention(tmp_path):
    said = refusal(run(tmp_path))
    assert (
        "flashrl.kv_cache=int8_per_token_head" in said
        and "heads of 96" in said
        and "attention_backend=TRITON_ATTN" in said
    )
    assert (
        validate_config(run(tmp_path, **{BACKEND.removeprefix("+"): "TRITON_ATTN"})).kv_cache
        is KVCache.INT8_PER_TOKEN_HEAD
    )
    validate_config(run(tmp_path, **{"flashrl.kv_cache": "auto"}))


def test_a_configuration_of_attention_that_names_no_backend_gets_ours_and_its_check(tmp_path):
    attention = BACKEND.removeprefix("+").replace("attention_backend", "attention_config")
    assert "heads of 96" in refusal(run(tmp_path, **{attention: {"flash_attn_version": 2}}))
    validate_config(run(tmp_path, **{attention: {"backend": "TRITON_ATTN"}}))


def test_the_plan_does_not_advise_it_for_such_a_model():
    config = load_config("qwen2.5-7b")
    config.head_dim = 96
    work = Work(sequences=64, prompt=1024, response=15000)
    made = make_plan("of 96", shape_of(config), gpus.find("h200"), 1, Engine(), work)
    assert all("heads of 96" in outcome.refused for outcome in made.outcomes if outcome.choice.eight_bit_kv)
    assert "kv_cache" not in " ".join(made.advice)


def groups(lengths, new, first, at_once):
    starts = [0]
    for count in new:
        starts.append(starts[-1] + count)
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


def test_rows_that_pad_a_batch_are_not_read():
    assert groups([7, 0, 0], [1, 0, 0], first=1, at_once=100) == []
