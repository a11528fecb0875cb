# SPDX-License-Identifier: Apache-2.0
"""What config.json tells of a model's layers is what vLLM builds, and ``fp8_block`` is refused with it before a run."""

import io
import json

import pytest
from refusals import ROLLOUT, changed, refusal
from tiny_models import CONFIGS, LAYERS, make, sizes

from flashrl_verl.bench import engine_model
from flashrl_verl.bench.shapes import load_config, save_config
from flashrl_verl.config import FlashRLConfig, Precision
from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.rank_layers import PACKED, decoder_layers, require_blocks_of_model
from flashrl_verl.validation import validate_config

MODEL = "actor_rollout_ref.model.path"
BLOCKS = FlashRLConfig(precision="fp8_block")


@pytest.mark.parametrize("family", CONFIGS)
def test_the_layers_of_a_known_family_are_those_that_vllm_builds(tmp_path, family):
    from flashrl_verl.plugin_vllm import register
    from flashrl_verl.quantization.config import engine_arguments
    from flashrl_verl.quantization.linear import QuantizedLinearMethod
    from flashrl_verl.quantization.moe import QuantizedMoEMethod

    register()
    make(family, **sizes(family, "fp8_block")).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] in PACKED
    told = {
        f"model.layers.{number}.{layer.name}": (sum(layer.parts), layer.columns)
        for number, layers in enumerate(decoder_layers(config, 1))
        for layer in layers
    }
    built = {}
    with engine_model.model(tmp_path, **engine_arguments(BLOCKS)) as (model, _):
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizedLinearMethod):
                built[method._prefix] = tuple(module.weight.shape)
            elif isinstance(method, QuantizedMoEMethod):
                built[method._prefix] = (module.w13_weight.shape[1] // 2, module.w13_weight.shape[2])
    assert built == told and len(built) == (3 if family == "qwen3-moe" else 4) * LAYERS
    require_blocks_of_model(config, BLOCKS, 1)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_layers_of_a_mixture_that_have_no_experts_are_told(key):
    config = load_config("qwen3-30b-a3b").to_dict() | {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    config[key] = config.pop("num_local_experts")
    names = [[layer.name for layer in layers] for layers in decoder_layers(config, 1)]
    assert ["mlp.experts" in layer for layer in names] == [False, False, False, True, False, True]


def run(folder, model: str | dict, ranks: int, **settings):
    """The base experiment in fp8_block with a model that lies in ``folder``."""
    if isinstance(model, str):
        save_config(load_config(model), folder)
    else:
        (folder / "config.json").write_text(json.dumps(model))
    keys = {f"flashrl.{key}": value for key, value in {"precision": "fp8_block", **settings}.items()}
    return changed({MODEL: str(folder), f"{ROLLOUT}.tensor_model_parallel_size": ranks, **keys})


@pytest.mark.parametrize(
    "model, ranks, layer, numbers",
    [
        ("qwen2.5-0.5b", 2, "self_attn.qkv_proj", "448 output rows x 896 input columns"),
        ("qwen2.5-14b", 8, "mlp.gate_up_proj", "1728 output rows x 5120 input columns"),
        ("qwen3-30b-a3b", 4, "mlp.experts", "192 output rows x 2048 input columns"),
    ],
)
def test_what_an_engine_would_refuse_is_refused_when_the_run_is_composed(tmp_path, model, ranks, layer, numbers):
    said = refusal(run(tmp_path, model, ranks))
    assert said.startswith(f"model.layers.0.{layer}: flashrl.precision=fp8_block ") and numbers in said
    assert "a smaller actor_rollout_ref.rollout.tensor_model_parallel_size" in said
    assert validate_config(run(tmp_path, model, 1)).precision is Precision.FP8_BLOCK
    assert validate_config(run(tmp_path, model, ranks, precision="fp8")).precision is Precision.FP8


def test_where_one_rank_has_no_whole_blocks_either_no_smaller_size_is_named(tmp_path):
    for ranks in (1, 2):
        said = refusal(run(tmp_path, CONFIGS["qwen3"].to_dict(), ranks))
        assert "136 input columns" in said and "tensor_model_parallel_size" not in said


@pytest.mark.parametrize("kv_heads, helps", [(1, False), (2, True)], ids=["ranks share a KV head", "one KV head a rank"])
def test_no_smaller_size_is_named_where_it_gives_no_rank_more_of_a_kv_head(tmp_path, kv_heads, helps):
    model = load_config("qwen2.5-0.5b").to_dict() | {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 64}
    said = refusal(run(tmp_path, model | {"num_key_value_heads": kv_heads}, 2))
    assert "qkv_proj" in said and "64 output rows x 1024 input columns" in said
    assert ("a smaller actor_rollout_ref.rollout.tensor_model_parallel_size" in said) == helps


@pytest.mark.parametrize(
    "settings",
    [
        {"ignore": ["re:.*self_attn"]},
        {"keep_first_layers": 24},
        {"keep_first_layers": 20, "keep_last_layers": 4},
        {"ignore": ["re:.*[qkv]_proj", "re:.*o_proj"]},
    ],
    ids=str,
)
def test_layers_that_stay_in_bf16_are_not_looked_at(tmp_path, settings):
    validate_config(run(tmp_path, "qwen2.5-0.5b", 2, **settings))


def test_a_layer_that_is_left_over_is_the_one_that_is_named(tmp_path):
    said = refusal(run(tmp_path, "qwen2.5-0.5b", 2, ignore=["re:.*qkv_proj"], keep_first_layers=3))
    assert said.startswith("model.layers.3.self_attn.o_proj: ") and "896 output rows x 448 input columns" in said


@pytest.mark.parametrize(
    "change", [{"model_type": "gemma3"}, {"hidden_size": None}, {"num_attention_heads": 7}], ids=["family", "key", "heads"]
)
def test_what_is_not_known_is_left_to_the_engine(tmp_path, change):
    config = {key: value for key, value in {**load_config("qwen2.5-0.5b").to_dict(), **change}.items() if value is not None}
    validate_config(run(tmp_path, config, 2))


NUMBERS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "head_dim", "moe_intermediate_size")


@pytest.mark.parametrize("value", [None, "896", 0, True, [1]], ids=str)
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_that_are_none_are_left_to_the_engine(tmp_path, key, value):
    model = load_config("qwen3-30b-a3b").to_dict()
    with pytest.raises(ConfigError, match="192 output rows"):
        require_blocks_of_model(model, BLOCKS, 4)
    validate_config(run(tmp_path, model | {key: value}, 4))


def test_kv_heads_that_are_null_are_as_many_as_heads():
    model = load_config("qwen2.5-0.5b").to_dict() | {"num_key_value_heads": None}
    with pytest.raises(ConfigError, match="448 output rows"):
        require_blocks_of_model(model, BLOCKS, 2)


def test_a_model_that_is_not_here_or_cannot_be_read_is_left_to_others(tmp_path):
    cfg = run(tmp_path, "qwen2.5-0.5b", 2)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        validate_config(cfg)
    (tmp_path / "config.json").unlink()
    validate_config(cfg)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_plan_and_a_run_say_the_same(name, ranks):
    from flashrl_verl.plan.planner import _blocks_refused, _divides
    from flashrl_verl.plan.shape import shape_of

    config = load_config(name)
    shape = shape_of(config)
    if not _divides(shape, ranks):
        assert not list(decoder_layers(config.to_dict(), ranks))
        return
    said = None
    try:
        require_blocks_of_model(config.to_dict(), BLOCKS, ranks)
    except ConfigError as error:
        said = str(error).removeprefix("model.layers.0.")
    assert _blocks_refused(shape, ranks) == said


def test_a_plan_says_what_an_engine_would_refuse():
    from rich.console import Console

    from flashrl_verl.plan.gpus import find
    from flashrl_verl.plan.request import DEFAULTS, plan_of
    from flashrl_verl.plan.table import render

    plan = plan_of({**DEFAULTS, "model": "qwen2.5-0.5b", "tensor_parallel": 2, "max_num_seqs": 64}, find("h200"))
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render(plan))
    assert "fp8_block: not possible, self_attn.qkv_proj: " in console.export_text()
    assert "448 output rows" in plan.as_json()["blocks_refused"]
