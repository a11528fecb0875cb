# SPDX-License-Identifier: Apache-2.0
"""``fp8_block``: loaders at tensor-parallel sizes 1, 2 and 4, layers that are refused, and the spot checks of an update."""

import re
from pathlib import Path

import pytest
import torch
from vllm.model_executor.layers.linear import QKVParallelLinear

from flashrl_verl.bench.shapes import load_config
from flashrl_verl.config import FlashRLConfig, Precision
from flashrl_verl.errors import ConfigError
from flashrl_verl.quantization.formats.fp8_block import FORMAT
from flashrl_verl.quantization.numerics import as_bytes, quantize
from flashrl_verl.quantization.parameter import QuantizedExperts, QuantizedWeight
from flashrl_verl.quantization.whole_blocks import require_whole_blocks
from flashrl_verl.rollout.storage_check import StorageCheck

B = FORMAT.block


def random(rows: int, columns: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=g) * torch.logspace(-3, 1, columns)).bfloat16()


def storage(*shape: int) -> dict:
    data = torch.zeros(shape, dtype=FORMAT.dtype)
    scales = torch.nn.Parameter(torch.full(FORMAT.scale_shape(*shape), float("nan")), requires_grad=False)
    return {"data": data, "scales": scales}


def shard(rows: int, columns: int, rank: int, size: int) -> QuantizedWeight:
    """One rank's parameter. Its base class asks vLLM for the process group, which a unit test has none of."""
    parts = storage(rows, columns)
    weight = QuantizedWeight.__new__(QuantizedWeight, data=parts["data"])
    weight._set_up(parts["scales"], FORMAT)
    weight.tp_rank, weight.tp_size = rank, size
    return weight


def assert_holds(codes: torch.Tensor, scales: torch.Tensor, source: torch.Tensor) -> None:
    expected, expected_scales = quantize(source, FORMAT)
    assert torch.equal(as_bytes(codes), as_bytes(expected)) and torch.equal(scales, expected_scales)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_cut_columns_and_rows_without_changing_codes_or_scales(size):
    source = random(4 * B, 4 * B, 1)
    columns = [shard(4 * B // size, 4 * B, rank, size) for rank in range(size)]
    rows = [shard(4 * B, 4 * B // size, rank, size) for rank in range(size)]
    for weight in columns:
        weight.load_column_parallel_weight(source)
        assert weight.loaded_elements == weight.numel()
    for weight in rows:
        weight.load_row_parallel_weight(source)
    assert_holds(torch.cat([w.data for w in columns]), torch.cat([w.scales.data for w in columns]), source)
    assert_holds(torch.cat([w.data for w in rows], 1), torch.cat([w.scales.data for w in rows], 1), source)


@pytest.mark.parametrize("size, kv_heads", [(1, 2), (2, 2), (4, 2)], ids=["TP 1", "TP 2", "TP 4 with KV replicas"])
def test_ranks_that_share_a_kv_head_of_a_block_hold_the_same_blocks(size, kv_heads):
    heads, columns = 4, 2 * B
    q, k, v = random(heads * B, columns, 2), random(kv_heads * B, columns, 3), random(kv_heads * B, columns, 4)
    replicas = max(1, size // kv_heads)
    q_rows, kv_rows = heads * B // size, max(1, kv_heads // size) * B
    for rank in range(size):
        weight = shard(q_rows + 2 * kv_rows, columns, rank, size)
        for shard_id, source, offset, rows in (
            ("q", q, 0, q_rows), ("k", k, q_rows, kv_rows), ("v", v, q_rows + kv_rows, kv_rows),
        ):  # fmt: skip
            weight.load_qkv_weight(source, shard_id=shard_id, shard_offset=offset, shard_size=rows, num_heads=replicas)
        first = rank // replicas * kv_rows
        own = torch.cat([q[rank * q_rows : (rank + 1) * q_rows], k[first : first + kv_rows], v[first : first + kv_rows]])
        assert_holds(weight.data, weight.scales.data, own)


@pytest.mark.parametrize("size", [1, 2])
def test_experts_are_cut_along_the_intermediate_dimension(size):
    count, hidden, intermediate = 3, 2 * B, 2 * B
    part = intermediate // size
    sources = {s: [random(intermediate, hidden, 10 * i + e) for e in range(count)] for i, s in ((1, "w1"), (2, "w3"))}
    down = [random(hidden, intermediate, 40 + e) for e in range(count)]
    for rank in range(size):
        w13, w2 = (
            QuantizedExperts(**storage(*shape), format=FORMAT, tp_rank=rank, tp_size=size)
            for shape in ((count, 2 * part, hidden), (count, hidden, part))
        )
        mine = slice(rank * part, (rank + 1) * part)
        for e in range(count):
            for shard_id in ("w1", "w3"):
                w13.weight_loader(w13, sources[shard_id][e], "w", shard_id, e)
            w2.weight_loader(w2, down[e], "w", "w2", e)
        for e in range(count):
            assert_holds(w13.data[e], w13.scales.data[e], torch.cat([sources[s][e][mine] for s in ("w1", "w3")]))
            assert_holds(w2.data[e], w2.scales.data[e], down[e][:, mine].contiguous())
        assert w13.loaded_elements == w13.numel() and w2.loaded_elements == w2.numel()


def test_rows_that_are_not_whole_blocks_are_never_written():
    with pytest.raises(ValueError, match="rows 64 to 192 are not whole blocks of 128"):
        shard(4 * B, B, 0, 1).row_range(64, B)


@pytest.mark.parametrize(
    "parts, columns, rows_said",
    [([256, 64, 64], 512, 64), ([256, 128], 344, 256), ([2368], 3584, 2368), ([192], 2048, 192)],
    ids=["KV heads of 64 on two ranks", "intermediate 344", "an intermediate of 18944 on eight ranks", "Qwen3-30B-A3B on four"],
)
def test_what_is_not_whole_blocks_is_refused_with_the_layer_both_numbers_and_the_remedy(parts, columns, rows_said):
    with pytest.raises(ConfigError) as caught:
        require_whole_blocks(Precision.FP8_BLOCK, "model.layers.0.mlp.x_proj", parts, columns)
    said = str(caught.value)
    assert said.startswith("model.layers.0.mlp.x_proj: flashrl.precision=fp8_block")
    assert f"{rows_said} output rows x {columns} input columns" in said
    assert "Set flashrl.precision=fp8," in said and "flashrl.ignore" in said


@pytest.mark.parametrize(
    "parts, columns, ranks, helps",
    [
        ([256, 64, 64], 512, ([2, 2, 2], 1), True),
        ([256, 64, 64], 512, ([2, 1, 1], 1), False),
        ([256, 64, 64], 136, ([2, 2, 2], 1), False),
        ([512], 1728, ([1], 8), True),
        ([512], 172, ([1], 2), False),
        ([64], 128, ([1], 1), False),
    ],
)
def test_another_tensor_parallel_size_is_named_only_where_one_rank_would_have_whole_blocks(parts, columns, ranks, helps):
    with pytest.raises(ConfigError) as caught:
        require_whole_blocks(Precision.FP8_BLOCK, "x", parts, columns, row_ranks=ranks[0], column_ranks=ranks[1])
    assert ("or a smaller actor_rollout_ref.rollout.tensor_model_parallel_size" in str(caught.value)) == helps


@pytest.mark.parametrize("replicas, cut", [(1, [4, 4, 4]), (2, [4, 2, 2]), (4, [4, 1, 1])])
def test_rows_of_a_kv_head_that_ranks_share_are_cut_among_fewer(replicas, cut):
    from flashrl_verl.quantization.linear import _row_ranks

    layer = torch.nn.Module()
    layer.num_kv_head_replicas = replicas  # as vLLM's QKVParallelLinear of four ranks has it
    assert _row_ranks(layer, 4, 3) == cut
    assert _row_ranks(torch.nn.Module(), 4, 2) == [4, 4]


@pytest.mark.parametrize("parts, columns", [([256, 128, 128], 896), ([4864, 4864], 896), ([128], 128)])
def test_whole_blocks_are_taken_whatever_their_number(parts, columns):
    require_whole_blocks(Precision.FP8_BLOCK, "x", parts, columns)


def test_formats_with_a_scale_a_row_take_any_shape():
    for precision in (Precision.INT8, Precision.FP8):
        require_whole_blocks(precision, "x", [37, 5], 11)


def test_a_real_layer_of_other_shapes_is_refused_when_its_weights_are_made(tmp_path):
    from flashrl_verl.bench import engine_model, shapes
    from flashrl_verl.plugin_vllm import register
    from flashrl_verl.quantization.config import FlashRLQuantizationConfig, quantization_config_dict

    register()
    settings = quantization_config_dict(FlashRLConfig(precision="fp8_block"))
    config = FlashRLQuantizationConfig.from_config(settings)
    path = shapes.save_config(shapes.load_config("tiny"), tmp_path)
    with engine_model.vllm_config(path), engine_model.process_group():
        with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.qkv_proj: .* 64 output rows x 256 input columns"):
            QKVParallelLinear(256, 64, 4, 1, bias=False, quant_config=config, prefix="model.layers.0.self_attn.qkv_proj")
        made = QKVParallelLinear(256, 64, 4, 2, bias=False, quant_config=config, prefix="model.layers.0.self_attn.qkv_proj")
        assert made.weight.shape == (512, 256) and made.weight_scale.shape == (4, 2)


def test_storage_says_how_many_rows_and_columns_share_a_scale():
    assert shard(4 * B, 2 * B, 0, 1).kind == shard(B, B, 0, 1).kind == FORMAT.storage == "float8_e4m3fn by 128x128"
    weight = shard(4 * B, 2 * B, 0, 1)
    for shape, kind in (((4, 1), "by 128x256"), ((4 * B, 2), "by 1x128"), ((4 * B, 1), "")):
        weight.scales = torch.nn.Parameter(torch.ones(shape), requires_grad=False)
        assert weight.kind == f"float8_e4m3fn {kind}".strip()


CHANGES = {
    "nothing": lambda w: None,
    "every code": lambda w: as_bytes(w.data).bitwise_xor_(1),
    "codes of one column": lambda w: as_bytes(w.data)[:, 200].bitwise_xor_(1),
    "scales of one column of blocks": lambda w: w.scales.data[:, 2].mul_(1.0001),
    "the scales of other rows": lambda w: w.scales.data.copy_(w.scales.data.flip(0)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", range(5))
def test_spot_checks_of_any_step_find_storage_that_is_not_what_arrived(change, step):
    gate, up = random(3 * B, 3 * B, 50), random(3 * B, 3 * B, 51)
    weight = shard(6 * B, 3 * B, 0, 1)
    weight.load_merged_column_weight(gate, shard_offset=0, shard_size=3 * B, shard_id=0)
    weight.load_merged_column_weight(up, shard_offset=3 * B, shard_size=3 * B, shard_id=1)
    check = StorageCheck(step)
    check.expect_codes("gate", weight, gate, 0, 0)
    check.expect_codes("up", weight, up, 3 * B, 0)
    CHANGES[change](weight)
    check.compare()
    assert check.wrong_codes() == ([] if change == "nothing" else ["gate", "up"])


@pytest.mark.parametrize("rank", [0, 1])
def test_spot_checks_of_a_rank_look_at_its_columns_only(rank):
    source = random(2 * B, 4 * B, 60)
    weight = shard(2 * B, 2 * B, rank, 2)
    weight.load_row_parallel_weight(source)
    check = StorageCheck(0)
    check.expect_codes("down", weight, source, 0, rank * 2 * B)
    check.compare()
    assert check.wrong_codes() == []


def takes(config, size: int) -> bool:
    """Whether a rank of ``size`` has whole blocks of every projection, and vLLM cuts the heads so."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    if heads % size or width % size:
        return False
    query, key = heads // size * head, max(1, kv_heads // size) * head
    layers = [([query, key, key], config.hidden_size), ([config.hidden_size], query)]
    layers += [([width // size, width // size], config.hidden_size), ([config.hidden_size], width // size)]
    try:
        for parts, columns in layers:
            require_whole_blocks(Precision.FP8_BLOCK, "x", parts, columns)
    except ConfigError:
        return False
    return True


def test_the_page_says_which_models_take_it():
    page = (Path(__file__).parents[2] / "docs" / "fp8_block.md").read_text()
    told = {
        row[0].lower(): [int(size) for size in row[1].split(",")]
        for row in re.findall(r"^\| (Qwen[\w.-]+) \| ([\d, ]+) \|", page, re.MULTILINE)
    }
    assert len(told) == 5
    for name, sizes in told.items():
        config = load_config(name)
        assert sizes == [size for size in (1, 2, 4, 8) if takes(config, size)], name


def test_experts_whose_activation_scales_would_be_rounded_to_powers_of_two_are_refused():
    from flashrl_verl.quantization.formats.fp8_block import FORMAT
    from flashrl_verl.quantization.moe import require_float_scales

    require_float_scales(FORMAT, "model.layers.0.mlp.experts", rounds_scales=False)
    with pytest.raises(
        ConfigError, match=r"layers\.0\.mlp\.experts.*powers of two.*VLLM_USE_DEEP_GEMM_E8M0='\"0\"', or flashrl"
    ):
        require_float_scales(FORMAT, "model.layers.0.mlp.experts", rounds_scales=True)
