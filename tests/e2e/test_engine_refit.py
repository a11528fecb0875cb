# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine takes weight updates: its INT8 storage against a recomputation from the trainer.

The engine runs in this process, so its parameters can be looked at; the trainer is a Hugging Face model with AdamW. On
a machine with a GPU the engine is the CUDA one, with CUDA graphs and sleep mode; elsewhere it is the CPU one.
"""

import weakref

import numpy as np
import pytest
import torch
from engines import CUDA, Refit, greedy
from engines import engine as start_engine
from references import assert_storage
from tiny_models import LAYERS, VOCAB, make, wire
from transformers import PreTrainedModel

from flashrl_verl.errors import RefitError

pytestmark = pytest.mark.cpu_e2e


@pytest.fixture(scope="module")
def trainer() -> PreTrainedModel:
    return make("qwen2.5")


@pytest.fixture(scope="module")
def engine(trainer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    trainer.config.save_pretrained(path)
    with start_engine(path, {"precision": "int8"}, compiled=CUDA, enable_sleep_mode=CUDA) as llm:
        yield llm


@pytest.fixture
def refit(engine) -> Refit:
    """A fresh account of the engine's model, called to send it an update."""
    return Refit(engine)


def assert_storage_is_int8_of(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    counts = assert_storage(dict(model.named_parameters()), weights, "int8")
    assert counts["quantized"] == 4 * LAYERS


def optimizer_step(model: torch.nn.Module, lr: float, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (4, 16), generator=g)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_four_linears_per_layer_are_int8_and_take_about_half_the_bytes(engine):
    from flashrl_verl.rollout.inspection import require_settings
    from flashrl_verl.settings import FlashRLConfig

    (layers,) = engine.collective_rpc("flashrl_layers")
    require_settings(FlashRLConfig(precision="int8"), layers)
    assert layers["precision"] == "int8"
    assert layers["quantized_layers"] == 4 * LAYERS
    assert layers["unquantized_layers"] == {}
    assert 0.5 < layers["quantized_bytes"] / layers["quantized_bytes_as_bf16"] < 0.53


def test_codes_and_scales_equal_a_float32_recomputation_before_and_after_an_optimizer_step(engine, trainer, refit):
    before = wire(trainer)
    report = refit(before, step=0)
    assert report["tensors"] == len(before) and report["skipped"] == []
    assert_storage_is_int8_of(refit.model, before)
    optimizer_step(trainer, lr=1e-2, seed=1)
    after = wire(trainer)
    refit(after, step=1)
    assert_storage_is_int8_of(refit.model, after)
    changed = [n for n in after if not torch.equal(before[n], after[n])]
    assert len(changed) == len(after), "an optimizer step that changes nothing would make this test empty"


def test_an_update_of_one_unit_in_the_last_place_reaches_the_storage(trainer, refit):
    """As at a learning rate of 1e-6, where no health metric would tell a stale tensor."""
    weights = wire(trainer)
    refit(weights, step=0)
    for step in (1, 2):
        for name in (K_PROJ, DOWN_PROJ, NORM):
            flat = weights[name].view(-1)
            flat.view(torch.int16)[flat.abs().argmax()] += 1  # a largest element: its row gets another scale
        refit(weights, step=step)
        assert_storage_is_int8_of(refit.model, weights)


def test_log_probs_follow_the_trainer(engine, trainer, refit):
    for step in range(2):
        optimizer_step(trainer, lr=1e-3, seed=10 + step)
        refit(wire(trainer), step=step)
        tokens, log_probs = greedy(engine)
        ids = torch.tensor([[5, 6, 7, 8, *tokens]])
        with torch.no_grad():
            logits = trainer.to(torch.bfloat16)(input_ids=ids).logits.float()
        trainer.float()
        reference = logits.log_softmax(-1)[0, 3:-1].gather(-1, ids[0, 4:, None]).squeeze(-1)
        assert np.abs(np.array(log_probs) - reference.numpy()).max() < 0.15


def test_the_same_weights_give_the_same_output_at_the_same_addresses(engine, trainer, refit):
    first = wire(trainer)
    refit(first, step=0)
    addresses = {n: p.data_ptr() for n, p in refit.model.named_parameters()}
    output = greedy(engine)
    other = {n: (t.float() + 0.02).bfloat16() for n, t in first.items()}
    refit(other, step=1)
    assert greedy(engine) != output
    refit(first, step=2)
    assert greedy(engine) == output
    assert {n: p.data_ptr() for n, p in refit.model.named_parameters()} == addresses


@pytest.mark.gpu
def test_after_sleep_level_2_a_refit_restores_output_and_addresses(engine, trainer, refit):
    weights = wire(trainer)
    refit(weights, step=0)
    addresses = {n: p.data_ptr() for n, p in refit.model.named_parameters()}
    output = greedy(engine)
    for step in range(1, 4):
        engine.sleep(level=2)
        engine.wake_up(tags=["weights"])
        refit(weights, step=step)
        engine.wake_up(tags=["kv_cache"])
        assert greedy(engine) == output
    assert {n: p.data_ptr() for n, p in refit.model.named_parameters()} == addresses


NORM = "model.norm.weight"
DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def test_bf16_that_a_loader_truncates_into_8_bit_storage_is_noticed(trainer, refit, monkeypatch):
    """What ``ReplicatedLinear`` and vLLM's fused experts do behind a parameter's back: ``copy_``, without a word."""
    from flashrl_verl.quantization.parameter import QuantizedWeight

    weights = {n: t * 100 for n, t in wire(trainer).items()}  # large enough that truncated they are not all zero
    monkeypatch.setattr(
        QuantizedWeight, "load_row_parallel_weight", lambda self, loaded_weight: self.data.copy_(loaded_weight)
    )
    with pytest.raises(
        RefitError, match=r"not written exactly once: .*model\.layers\.0\.mlp\.down_proj\.weight \(0 of"
    ):
        refit(weights, step=0)


@pytest.mark.parametrize("first_update", [True, False], ids=["first update", "later update"])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.pop(K_PROJ), "k_proj|qkv_proj"),
        (lambda w: w.pop("model.layers.1.self_attn.v_proj.bias"), r"v_proj\.bias|qkv_proj\.bias"),
        (lambda w: w.pop(NORM), r"model\.norm\.weight"),
        (lambda w: w.update({"model.layers.0.mlp.extra_proj.weight": torch.zeros(2, 2).bfloat16()}), "extra_proj"),
        (lambda w: w.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(2).bfloat16()}), r"up_proj\.bias"),
        (lambda w: w.update({UP_PROJ: w[UP_PROJ][:-8]}), r"up_proj\.weight.*336"),
        (lambda w: w.update({UP_PROJ: torch.cat([w[UP_PROJ], w[UP_PROJ]])}), r"up_proj\.weight.*688"),
        (
            lambda w: w.update({UP_PROJ: w[UP_PROJ].float()}),
            r"(rollout's dtype, bfloat16|changed tensors).*up_proj\.weight",
        ),
        (lambda w: w[UP_PROJ].fill_(float("nan")), r"NaN or Inf in .*up_proj\.weight"),
        (lambda w: w[NORM].fill_(float("inf")), r"NaN or Inf in .*model\.norm\.weight"),
    ],
    ids=[
        *(
            "missing shard",
            "missing bias",
            "missing norm",
            "extra weight",
            "extra bias",
            "too small",
            "too large",
            "FP32",
        ),
        *("NaN", "Inf"),
    ],
)
def test_whatever_is_unaccounted_for_is_one_error_that_names_it(trainer, refit, change, message, first_update):
    if not first_update:
        refit(wire(trainer), step=0)
    weights = wire(trainer)
    change(weights)
    with pytest.raises(RefitError, match=f"step 7: .*({message})"):
        refit(weights, step=7)


def test_all_that_is_wrong_with_what_arrived_is_listed_together(trainer, refit):
    refit(wire(trainer), step=0)
    weights = wire(trainer)
    del weights[K_PROJ]
    weights["model.layers.0.mlp.extra_proj.weight"] = torch.zeros(2, 2)
    weights[UP_PROJ] = weights[UP_PROJ][:-8]
    with pytest.raises(RefitError) as caught:
        refit(weights, step=3)
    assert all(name in str(caught.value) for name in (K_PROJ, "extra_proj", UP_PROJ))
    assert "more than once" not in str(caught.value)


def test_a_tensor_that_arrives_twice_is_noticed(trainer, refit):
    refit(wire(trainer), step=0)
    items = list(wire(trainer).items())
    refit.account.begin(1)
    for bucket in (items, [(NORM, dict(items)[NORM])]):
        refit.account.load([(name, tensor.to(refit.device)) for name, tensor in bucket])
    with pytest.raises(RefitError, match=rf"arrived more than once: {NORM}"):
        refit.account.finish()


@pytest.mark.parametrize("skipped", [NORM, "model.layers.1.self_attn.k_proj.bias", K_PROJ])
def test_a_parameter_that_the_loader_leaves_out_is_noticed_in_any_update(trainer, refit, monkeypatch, skipped):
    """The receipt's checksums, of what arrived, would not see it: the parameter would keep the weights of the update
    before."""
    refit(wire(trainer), step=0)
    load_weights = refit.model.load_weights
    monkeypatch.setattr(
        refit.model, "load_weights", lambda weights: load_weights(p for p in weights if p[0] != skipped)
    )
    with pytest.raises(RefitError, match=r"(unwritten|not written exactly once).*(model\.norm|qkv_proj)"):
        refit(wire(trainer), step=1)


def test_no_tensor_of_a_bucket_is_kept_past_the_call_that_loads_it(trainer, refit):
    """They lie in shared memory or another process's GPU memory, which is taken away afterwards."""
    for step in range(2):
        items = [(name, tensor.to(refit.device)) for name, tensor in wire(trainer).items()]
        alive = [weakref.ref(tensor) for _, tensor in items]
        refit.account.begin(step)
        refit.account.load(items)
        del items
        assert not [ref for ref in alive if ref() is not None]
        refit.account.finish()


def test_a_tensor_that_is_not_contiguous_is_quantized_all_the_same(trainer, refit):
    weights = wire(trainer)
    weights[UP_PROJ] = weights[UP_PROJ].t().contiguous().t()
    refit(weights, step=0)
    assert_storage_is_int8_of(refit.model, weights)


def test_a_parameter_that_moves_is_noticed(trainer, refit):
    refit(wire(trainer), step=0)
    refit.model.model.norm.weight.data = refit.model.model.norm.weight.data.clone()
    with pytest.raises(RefitError, match="moved, which CUDA graphs would not see: model.norm.weight"):
        refit(wire(trainer), step=1)


def test_a_tensor_the_model_transforms_before_it_loads_it_is_quantized_and_checked(trainer, refit):
    load_weights = refit.model.load_weights

    def transformed(weights):
        return load_weights((n, t * 2 if n == K_PROJ else t) for n, t in weights)

    refit.model.load_weights = transformed
    try:
        weights = wire(trainer)
        for step in range(2):
            refit(weights, step)
            assert_storage_is_int8_of(refit.model, {**weights, K_PROJ: weights[K_PROJ] * 2})
        weights[K_PROJ].fill_(2e38)  # finite as it arrives, Inf when doubled
        with pytest.raises(RefitError, match=r"not finite: .*layers\.0\.self_attn\.qkv_proj"):
            refit(weights, 3)
    finally:
        del refit.model.load_weights


def test_layers_with_stale_copies_are_found_and_an_update_mends_the_rest(engine, trainer, refit):
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from flashrl_verl.refit.stale_copies import layers_with_stale_copies

    def stale() -> list[str]:
        return layers_with_stale_copies(
            refit.model, lambda: process_weights_after_loading(refit.model, refit.model_config, refit.device)
        )

    weights = wire(trainer)
    refit(weights, step=0)
    output = greedy(engine)
    assert stale() == []
    refit(weights, step=1)
    assert greedy(engine) == output
    name, module = "model.layers.1.mlp.down_proj", refit.model.model.layers[1].mlp.down_proj
    apply, kept = module.quant_method.apply, module.weight.data.clone()
    module.quant_method.apply = lambda layer, x, bias=None: (
        x.float() @ kept.float().t() if layer is module else apply(layer, x, bias)
    )
    try:
        assert stale() == [name]
    finally:
        del module.quant_method.apply
        refit(weights, step=2)
    assert greedy(engine) == output
