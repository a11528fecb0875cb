# SPDX-License-Identifier: Apache-2.0
"""Layers the user keeps: exact names, patterns, fused layers by their parts."""

import pytest

from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.selection import LayerSelection, expert_parts, fused_parts

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"], "o_proj": ["o_proj"]}
LAYERS = 6
FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
NAMES = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in FUSED]


def kept(selection: LayerSelection) -> list[str]:
    return [name for name in NAMES if selection.keeps(name, fused_parts(name, PACKED))]


@pytest.mark.parametrize(
    "ignore, expected",
    [
        ([], []),
        (["model.layers.2.mlp.down_proj"], ["model.layers.2.mlp.down_proj"]),
        (["model.layers.2.mlp.down"], []),
        (["re:.*layers\\.[01]\\.mlp\\.down"], ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]),
        ([r"re:model\.layers\.[0-3]\."], NAMES[: 4 * len(FUSED)]),
        (["re:down_proj"], []),  # a pattern matches from the start of the name
        (["model.layers.4.self_attn.qkv_proj"], ["model.layers.4.self_attn.qkv_proj"]),
        (["re:.*1.*qkv_proj"], ["model.layers.1.self_attn.qkv_proj"]),
        (["re:.*layers\\.5\\..*(gate|up)_proj$"], ["model.layers.5.mlp.gate_up_proj"]),
        ([f"model.layers.1.self_attn.{p}_proj" for p in "qkv"], ["model.layers.1.self_attn.qkv_proj"]),
    ],
)
def test_entries_are_exact_names_or_patterns_and_may_name_the_parts_of_a_fused_layer(ignore, expected):
    selection = LayerSelection(ignore=ignore)
    assert kept(selection) == expected == selection.kept
    assert selection.unused() == ([] if expected else ignore)


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("re:.*k_proj", r"names .*k_proj, but not .*q_proj, .*v_proj.*qkv_proj"),
        # Not one for the fused layer, whose name ends like it.
        ("re:.*v_proj", "but not .*q_proj"),
        ("re:.*up_proj", "but not .*gate_proj"),
    ],
)
def test_some_parts_of_a_fused_layer_are_refused_with_the_missing_ones_named(pattern, message):
    with pytest.raises(ConfigError, match=message):
        kept(LayerSelection(ignore=[pattern]))


def test_experts_are_named_by_their_layer_or_all_of_their_projections():
    name = "model.layers.0.mlp.experts"
    parts = expert_parts(name, 4)
    assert len(set(parts)) == 12
    for entry, keeps in ((name, True), ("re:.*experts\\.", True), ("model.layers.0.mlp.gate", False)):
        assert LayerSelection(ignore=[entry]).keeps(name, parts) is keeps
    with pytest.raises(ConfigError, match="experts.2.down_proj, but not"):
        LayerSelection(ignore=[f"{name}.2.down_proj"]).keeps(name, parts)
