# SPDX-License-Identifier: Apache-2.0
"""Layers that compute with a copy of their codes, of their scales, or of both, are named; sound ones are not."""

from types import SimpleNamespace

import pytest
import torch

from flashrl_verl.plugins.vllm import register
from flashrl_verl.quantization import gemm
from flashrl_verl.refit.stale_copies import layers_with_stale_copies
from flashrl_verl.settings import Precision
from flashrl_verl.tools.check import numerics
from flashrl_verl.tools.engines import model as engine_model
from flashrl_verl.tools.engines import shapes

CPU = torch.device("cpu")


def stale(folder, precision: Precision) -> list[str]:
    """What is said of a model of one linear layer."""
    register()
    path = shapes.save_config(shapes.load_config("tiny"), folder)
    with engine_model.vllm_config(path), engine_model.process_group():
        layer = numerics._layer(precision, CPU, 256, 384, bias=False)
        model = torch.nn.ModuleDict({"down_proj": layer})
        return layers_with_stale_copies(model, lambda: layer.quant_method.process_weights_after_loading(layer))


@pytest.mark.parametrize("precision", list(Precision))
def test_a_sound_layer_is_not_named(tmp_path, precision):
    assert stale(tmp_path, precision) == []


@pytest.mark.parametrize("copied", [("weight",), ("weight_scale",), ("weight", "weight_scale")], ids="+".join)
def test_a_layer_that_computes_with_a_copy_is_named_whatever_it_copied(tmp_path, monkeypatch, copied):
    apply, copies = gemm.EmulatedGemm.apply, {}

    def with_copies(self, layer, x, bias):
        now = {name: getattr(layer, name).data for name in ("weight", "weight_scale")}
        for name in copied:
            now[name] = copies.setdefault(name, now[name].clone())
        return apply(self, SimpleNamespace(**now), x, bias)

    monkeypatch.setattr(gemm.EmulatedGemm, "apply", with_copies)
    assert stale(tmp_path, Precision.FP8) == ["down_proj"]


def test_a_packed_copy_that_is_not_made_again_is_named(tmp_path, monkeypatch):
    changed = gemm.OneDnnGemm.weights_changed

    def once(self, layer):
        if not hasattr(layer, "onednn_handle"):
            changed(self, layer)

    monkeypatch.setattr(gemm.OneDnnGemm, "weights_changed", once)
    assert stale(tmp_path, Precision.INT8) == ["down_proj"]
