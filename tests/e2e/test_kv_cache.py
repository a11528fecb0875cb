# SPDX-License-Identifier: Apache-2.0
"""A KV cache in E4M3 in a real vLLM engine: nothing of q, k and v is clipped, and its scales follow the policy.

On a machine with a GPU the engine is the CUDA one, elsewhere the CPU one, whose attention takes the scales as numbers.
"""

import contextlib
import math

import pytest
import torch
from engines import CUDA, Refit, runner, teacher_forced
from engines import engine as start_engine
from large_values import KEYS, ROUNDING, VALUES, distance, enlarged
from tiny_models import LAYERS, VOCAB, make, wire

from flashrl_verl.config import FlashRLConfig
from flashrl_verl.errors import ConfigError, FlashRLError
from flashrl_verl.rollout import kv_scales
from flashrl_verl.rollout.server import require_precision

pytestmark = pytest.mark.cpu_e2e


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3", "llama3", "qwen3-moe"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(family, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make(family).config.save_pretrained(path)
    with start_engine(path, {"precision": "int8", "kv_cache": "fp8"}, compiled=CUDA) as llm:
        yield llm


def attention_layers(llm) -> list[torch.nn.Module]:
    return [module for module in runner(llm).model.modules() if hasattr(module, "_k_scale")]


def scales(llm) -> list[list[float]]:
    return [[float(getattr(layer, f"_{part}_scale")) for part in "qkv"] for layer in attention_layers(llm)]


@contextlib.contextmanager
def largest_seen(llm):
    """What the attention layers are handed while the block runs: [q, k, v] of each, largest magnitudes."""
    seen = [[0.0, 0.0, 0.0] for _ in attention_layers(llm)]

    def look(i):
        def hook(module, arguments):
            for part, tensor in enumerate(arguments[:3]):
                seen[i][part] = max(seen[i][part], float(tensor.abs().max()))

        return hook

    hooks = [layer.register_forward_pre_hook(look(i)) for i, layer in enumerate(attention_layers(llm))]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def test_the_live_engine_says_that_its_cache_is_fp8(engine):
    (layers,) = engine.collective_rpc("flashrl_layers")
    require_precision(FlashRLConfig(precision="int8", kv_cache="fp8"), layers)
    assert layers["kv_cache"]["dtypes"] == {"fp8": LAYERS} and not layers["kv_cache"]["unfollowed"]
    assert runner(engine).kv_caches[0].element_size() == 1


@pytest.mark.skipif(CUDA, reason="a compiled model calls no hooks")
def test_nothing_that_attention_is_handed_exceeds_what_the_scales_take(engine, family):
    refit = Refit(engine)
    for step, weights in enumerate((wire(make(family, seed=3)), enlarged(wire(make(family, seed=4))))):
        refit(weights, step=step)
        prompts = torch.randint(3, VOCAB, (8, 60), generator=torch.Generator().manual_seed(step)).tolist()
        with largest_seen(engine) as seen:
            teacher_forced(engine, prompts)
        for largest, scale in zip(seen, scales(engine), strict=True):
            for part, (most, one) in enumerate(zip(largest, scale, strict=True)):
                assert 0 < most <= 448 * one, "qkv"[part]
                # Loose by sqrt(d), a rotation and a power of two, but no more than E4M3's normal range leaves room for.
                assert most >= 448 * one / 2**8, "qkv"[part]


def test_after_a_large_update_the_scales_are_others_and_the_output_is_the_same(engine, family):
    """With scales of 1, as vLLM has them, values of this size would be clipped."""
    weights = wire(make(family, seed=5))
    refit = Refit(engine)
    refit(weights, step=0)
    sequences = torch.randint(3, VOCAB, (16, 40), generator=torch.Generator().manual_seed(1)).tolist()
    before, reference = scales(engine), teacher_forced(engine, sequences)
    refit(enlarged(weights), step=1)
    for (q, k, v), (q0, k0, v0) in zip(scales(engine), before, strict=True):
        assert (q, k, v) == (q0 / KEYS, k0 * KEYS, v0 * VALUES)
    assert refit.account.kv_scales.live()["v"] == max(v for _, _, v in scales(engine))
    assert distance(engine, sequences, reference) <= ROUNDING
    for layer in attention_layers(engine):
        layer._v_scale.fill_(1.0)
        layer._v_scale_float = 1.0
    engine.reset_prefix_cache()
    assert distance(engine, sequences, reference) > 1e-2
    with pytest.raises(FlashRLError, match=r"the scales of model\.layers\.0\.self_attn\.attn are .*something has reset them"):
        refit.account.kv_scales.live()
    refit(weights, step=2)
    assert distance(engine, sequences, reference) == 0.0


def test_the_distance_to_the_trainer_is_below_5e_3_but_not_zero(engine, family):
    trainer = make(family, seed=6)
    sequences = torch.randint(3, VOCAB, (32, 60), generator=torch.Generator().manual_seed(2)).tolist()
    ids = torch.tensor(sequences)
    with torch.no_grad():
        logits = trainer.to(torch.bfloat16)(input_ids=ids).logits.float().log_softmax(-1)
    expected = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).tolist()
    trainer.float()
    Refit(engine)(wire(trainer), step=0)
    with_fp8 = distance(engine, sequences, expected)
    assert 0 < with_fp8 < 5e-3


def test_scales_that_no_update_wrote_are_not_numbers(engine, family):
    refit = Refit(engine)
    refit(wire(make(family)), step=0)
    assert refit.account.poison(refit.post_process) == []
    assert torch.tensor(scales(engine)).isnan().all()
    assert all(math.isnan(getattr(layer, f"_{part}_scale_float")) for layer in attention_layers(engine) for part in "qkv")
    refit(wire(make(family)), step=1)
    assert torch.tensor(scales(engine)).isfinite().all()


@pytest.mark.parametrize(
    "name, why",
    [
        ("_PRE_NORM", r"no bound is known for \w+Attention"),
        ("_PLAIN_ROPE", r"no bound is known for its rotary embedding, a \w*RotaryEmbedding"),
        ("READ_ON_USE", r"the attention backend \w+ keeps the scales that it first sees.*attention_backend=TRITON_ATTN"),
    ],
)
def test_a_model_whose_scales_could_not_follow_is_refused(engine, monkeypatch, name, why):
    monkeypatch.setattr(kv_scales, name, ())
    (layers,) = engine.collective_rpc("flashrl_layers")
    with pytest.raises(ConfigError, match=rf"kv_cache=fp8.*{why}.*flashrl\.kv_cache to auto"):
        require_precision(FlashRLConfig(precision="int8", kv_cache="fp8"), layers)


def test_an_attention_layer_that_is_no_module_of_the_model_is_refused(engine, monkeypatch):
    context = runner(engine).compilation_config.static_forward_context
    name = next(name for name in context if name.endswith("attn"))
    monkeypatch.setitem(context, "model.hidden.attn", context[name])
    (layers,) = engine.collective_rpc("flashrl_layers")
    with pytest.raises(ConfigError, match=r"model\.hidden\.attn for one: it is no module of the model"):
        require_precision(FlashRLConfig(precision="int8", kv_cache="fp8"), layers)


def test_what_vllm_does_when_it_wakes_is_undone(engine, family):
    """It sets the scales of keys and values to 1; on a CPU, where nothing sleeps, its function is called as it would be."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    refit = Refit(engine)
    refit(enlarged(wire(make(family))), step=0)
    before = scales(engine)
    GPUModelRunner.init_fp8_kv_scales(runner(engine))
    assert all(row[1:] == [1.0, 1.0] for row in scales(engine)) and scales(engine) != before
    refit.account.kv_scales.restore()
    assert scales(engine) == before
    refit.account.kv_scales.live()
