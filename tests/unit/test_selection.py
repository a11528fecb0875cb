# SPDX-License-Identifier: Apache-2.0
"""Layers the user keeps: exact names, patterns, fused layers by their parts, the first and the last."""

import pytest

from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.selection import LayerSelection, expert_parts, fused_parts

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"], "o_proj": ["o_proj"]}
LAYERS = 6
NAMES = [
    f"model.layers.{i}.{name}"
    for i in range(LAYERS)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]


def kept(selection: LayerSelection) -> list[str]:
    return [name for name in NAMES if selection.keeps(name, fused_parts(name, PACKED), LAYERS)]


def test_by_default_nothing_is_kept():
    selection = LayerSelection()
    assert kept(selection) == [] and selection.unused() == [] and selection.kept == []


@pytest.mark.parametrize(
    "ignore, expected",
    [
        (["model.layers.2.mlp.down_proj"], ["model.layers.2.mlp.down_proj"]),
        (["model.layers.2.mlp.down"], []),
        (["re:.*layers\\.[01]\\.mlp\\.down"], ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]),
        (["re:down_proj"], []),  # a pattern matches from the start of the name
        (["model.layers.4.self_attn.qkv_proj"], ["model.layers.4.self_attn.qkv_proj"]),
        (["re:.*layers\\.5\\..*(gate|up)_proj$"], ["model.layers.5.mlp.gate_up_proj"]),
        (
            [f"model.layers.1.self_attn.{p}_proj" for p in "qkv"],
            ["model.layers.1.self_attn.qkv_proj"],
        ),
    ],
)
def test_entries_are_exact_names_or_patterns_and_may_name_the_parts_of_a_fused_layer(ignore, expected):
    selection = LayerSelection(ignore=ignore)
    assert kept(selection) == expected == selection.kept
    assert selection.unused() == ([] if expected else ignore)


def test_some_parts_of_a_fused_layer_are_refused_with_the_missing_ones_named():
    with pytest.raises(ConfigError, match=r"names .*k_proj, but not .*q_proj, .*v_proj.*qkv_proj"):
        kept(LayerSelection(ignore=["re:.*k_proj"]))


@pytest.mark.parametrize("pattern, missing", [("re:.*v_proj", "q_proj"), ("re:.*up_proj", "gate_proj")])
def test_a_pattern_for_a_part_is_not_one_for_the_fused_layer_whose_name_ends_like_it(pattern, missing):
    with pytest.raises(ConfigError, match=f"but not .*{missing}"):
        kept(LayerSelection(ignore=[pattern]))


def test_a_pattern_for_a_fused_name_keeps_the_fused_layer():
    assert kept(LayerSelection(ignore=["re:.*1.*qkv_proj"])) == ["model.layers.1.self_attn.qkv_proj"]


@pytest.mark.parametrize(
    "first, last, numbers", [(0, 0, []), (2, 0, [0, 1]), (0, 1, [5]), (1, 2, [0, 4, 5]), (3, 3, range(6))]
)
def test_the_first_and_last_layers_are_kept_whole(first, last, numbers):
    selection = LayerSelection(keep_first=first, keep_last=last)
    assert kept(selection) == [name for name in NAMES if int(name.split(".")[2]) in numbers]


def test_an_entry_for_a_layer_that_is_kept_anyway_counts_as_used():
    selection = LayerSelection(ignore=["model.layers.0.mlp.down_proj"], keep_first=1)
    kept(selection)
    assert selection.unused() == []


def test_layers_outside_the_decoder_are_not_counted():
    assert not LayerSelection(keep_first=2, keep_last=2).keeps("visual.blocks.0.attn.qkv", [], LAYERS)


def test_experts_are_named_by_their_layer_or_all_of_their_projections():
    name = "model.layers.0.mlp.experts"
    parts = expert_parts(name, 4)
    assert len(parts) == 12 and parts[0] == "model.layers.0.mlp.experts.0.gate_proj"
    assert LayerSelection(ignore=[name]).keeps(name, parts, LAYERS)
    assert LayerSelection(ignore=["re:.*experts\\."]).keeps(name, parts, LAYERS)
    assert not LayerSelection(ignore=["model.layers.0.mlp.gate"]).keeps(name, parts, LAYERS)
    with pytest.raises(ConfigError, match="experts.2.down_proj, but not"):
        LayerSelection(ignore=[f"{name}.2.down_proj"]).keeps(name, parts, LAYERS)
