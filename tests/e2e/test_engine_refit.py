# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine takes weight updates: its INT8 storage against a recomputation from the trainer.

The engine runs in this process, so its parameters can be looked at; the trainer is a Hugging Face model with AdamW. On
a machine with a GPU the engine is the CUDA one, with CUDA graphs; elsewhere it is the CPU one.
"""

import weakref

import pytest
import torch
from engines import CUDA, Refit
from engines import engine as start_engine
from references import assert_storage
from tiny_models import LAYERS, VOCAB, make, wire
from transformers import PreTrainedModel

from flashrl_verl.errors import RefitError

NORM = "model.norm.weight"
DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
K_BIAS = "model.layers.1.self_attn.k_proj.bias"


@pytest.fixture(scope="module")
def trainer() -> PreTrainedModel:
    return make("qwen2.5")


@pytest.fixture(scope="module")
def engine(trainer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    trainer.config.save_pretrained(path)
    with start_engine(path, {"precision": "int8"}, compiled=CUDA) as llm:
        yield llm


@pytest.fixture
def refit(engine) -> Refit:
    """A fresh account of the engine's model, called to send it an update."""
    return Refit(engine)


def assert_storage_is_int8_of(refit: Refit, weights: dict[str, torch.Tensor]) -> None:
    counts = assert_storage(dict(refit.model.named_parameters()), weights, "int8")
    assert counts["quantized"] == 4 * LAYERS


def optimizer_step(model: torch.nn.Module, lr: float, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    ids = torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_codes_and_scales_equal_a_recomputation_before_and_after_an_optimizer_step(trainer, refit):
    before = wire(trainer)
    before[UP_PROJ] = before[UP_PROJ].t().contiguous().t()
    report = refit(before, step=0)
    assert report["tensors"] == len(before) and report["skipped"] == []
    assert_storage_is_int8_of(refit, before)
    optimizer_step(trainer, lr=1e-2, seed=1)
    after = wire(trainer)
    assert not any(torch.equal(before[name], after[name]) for name in after), "or this test would be empty"
    refit(after, step=1)
    assert_storage_is_int8_of(refit, after)


def test_an_update_of_one_unit_in_the_last_place_reaches_the_storage(trainer, refit):
    """As at a learning rate of 1e-6, where no health metric would tell a stale tensor."""
    weights = wire(trainer)
    for step in range(3):
        refit(weights, step)
        assert_storage_is_int8_of(refit, weights)
        for name in (K_PROJ, DOWN_PROJ, NORM):
            flat = weights[name].view(-1)
            flat.view(torch.int16)[flat.abs().argmax()] += 1  # a largest element: its row gets another scale


UNACCOUNTED = {
    "missing shard": (lambda w: w.pop(K_PROJ), "k_proj|qkv_proj"),
    "missing bias": (lambda w: w.pop(K_BIAS), r"k_proj\.bias|qkv_proj\.bias"),
    "missing norm": (lambda w: w.pop(NORM), r"model\.norm\.weight"),
    "extra weight": (lambda w: w.update({"model.layers.0.mlp.extra_proj.weight": w[K_PROJ]}), "extra_proj"),
    "extra bias": (lambda w: w.update({"model.layers.0.mlp.up_proj.bias": w[NORM]}), r"up_proj\.bias"),
    "too large": (lambda w: w.update({UP_PROJ: torch.cat([w[UP_PROJ], w[UP_PROJ]])}), r"up_proj\.weight.*688"),
    "FP32": (lambda w: w.update({UP_PROJ: w[UP_PROJ].float()}), r"(dtype, bfloat16|changed tensors).*up_proj\.weight"),
    "NaN": (lambda w: w[UP_PROJ][0].fill_(float("nan")), r"NaN or Inf in .*up_proj\.weight"),
    "Inf": (lambda w: w[NORM][:1].fill_(float("inf")), r"NaN or Inf in .*model\.norm\.weight"),
}


@pytest.mark.parametrize("first_update", [True, False], ids=["first update", "later update"])
@pytest.mark.parametrize("change, message", UNACCOUNTED.values(), ids=UNACCOUNTED)
def test_whatever_is_unaccounted_for_is_one_error_that_names_it(trainer, refit, change, message, first_update):
    if not first_update:
        refit(wire(trainer), step=0)
    weights = wire(trainer)
    change(weights)
    with pytest.raises(RefitError, match=f"step 7: .*({message})"):
        refit(weights, step=7)


def test_a_buffer_that_arrives_with_nan_is_named(engine, trainer, monkeypatch):
    model = Refit(engine).model
    monkeypatch.setitem(model._buffers, "correction", torch.zeros(4, device=next(model.parameters()).device))
    refit = Refit(engine)
    refit({**wire(trainer), "correction": torch.ones(4).bfloat16()}, step=0)
    with pytest.raises(RefitError, match="NaN or Inf in correction:"):
        refit({**wire(trainer), "correction": torch.full([4], float("nan")).bfloat16()}, step=1)


def test_a_tensor_that_arrives_twice_is_named(trainer, refit):
    bucket = [(name, tensor.to(refit.device)) for name, tensor in wire(trainer).items()]
    refit.account.begin(1)
    refit.account.load(bucket)
    refit.account.load(bucket[-1:])
    with pytest.raises(RefitError, match=f"arrived more than once: {bucket[-1][0]}"):
        refit.account.finish()


@pytest.mark.parametrize("skipped", [NORM, K_BIAS, K_PROJ])
def test_a_tensor_that_the_loader_skips_in_a_later_update_is_noticed(trainer, refit, monkeypatch, skipped):
    """The receipt's checksums, of what arrived, would not see it: the parameter would keep the weights of the update
    before."""
    refit(wire(trainer), step=0)
    load = refit.model.load_weights
    monkeypatch.setattr(refit.model, "load_weights", lambda weights: load(p for p in weights if p[0] != skipped))
    with pytest.raises(RefitError, match=r"(NaN or Inf in|not written exactly once:) .*(model\.norm|qkv_proj)"):
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


def test_a_parameter_that_moves_is_named(trainer, refit):
    refit(wire(trainer), step=0)
    norm = refit.model.model.norm.weight
    kept, norm.data = norm.data, norm.data.clone()
    try:
        with pytest.raises(RefitError, match=f"moved, which CUDA graphs would not see: {NORM}"):
            refit(wire(trainer), step=1)
    finally:
        norm.data = kept
