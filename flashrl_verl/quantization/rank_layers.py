# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of the layers that vLLM quantizes, from a model's config.json alone: families whose layers are known here.

The names and the fusion are vLLM's (``vllm/model_executor/models``); ``tests/unit/test_rank_layers.py`` compares them with the
layers it builds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashrl_verl.config import FlashRLConfig, Precision
from flashrl_verl.quantization.selection import LayerSelection, expert_parts, fused_parts
from flashrl_verl.quantization.whole_blocks import require_whole_blocks
from flashrl_verl.rules import positive_integer

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

PACKED: dict[str, Mapping[str, tuple[str, ...]]] = {
    "llama": _FUSED,
    "mistral": _FUSED,
    "phi3": {},  # fused in the checkpoint already
    "qwen2": _FUSED,
    "qwen3": _FUSED,
    "qwen3_moe": _FUSED,
}
"""``model_type`` of the known families, and the checkpoint's layers that vLLM fuses into one."""

_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_KEYS_OF = {"qwen3": ("head_dim",), "qwen3_moe": ("head_dim", "moe_intermediate_size")}
"""Without one of these, or a number of experts, transformers takes a default of the family, which is not repeated here."""


@dataclass(frozen=True, kw_only=True)
class RankLayer:
    """One rank's part of a layer."""

    name: str
    """vLLM's, below the decoder layer: ``self_attn.qkv_proj``."""
    parts: tuple[int, ...]
    """Output rows of each fused projection."""
    columns: int
    """Input columns."""
    row_ranks: tuple[int, ...]
    """Ranks among which the rows of each are cut: fewer than there are, where ranks share a KV head."""
    column_ranks: int = 1
    """And the columns."""

    def require_whole_blocks(self, precision: Precision, name: str) -> None:
        """``whole_blocks.require_whole_blocks`` of this layer, which is called ``name``."""
        cut = {"row_ranks": self.row_ranks, "column_ranks": self.column_ranks}
        require_whole_blocks(precision, name, self.parts, self.columns, **cut)


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int, ranks: int) -> list[RankLayer]:
    """The projections of an attention; ``ranks`` divides ``heads``, and ``kv_heads`` or is a multiple of it."""
    shared = min(ranks, kv_heads)
    query, key = heads // ranks * head_dim, kv_heads // shared * head_dim
    return [
        RankLayer(name="self_attn.qkv_proj", parts=(query, key, key), columns=hidden, row_ranks=(ranks, shared, shared)),
        RankLayer(name="self_attn.o_proj", parts=(hidden,), columns=query, row_ranks=(1,), column_ranks=ranks),
    ]


def mlp(hidden: int, width: int, ranks: int, *, experts: bool) -> list[RankLayer]:
    """The projections of an MLP of ``width`` rows, which ``ranks`` divides; of all experts alike, rows of one projection are
    columns of the other."""
    rows = width // ranks
    if experts:
        return [RankLayer(name="mlp.experts", parts=(rows,), columns=hidden, row_ranks=(ranks,))]
    return [
        RankLayer(name="mlp.gate_up_proj", parts=(rows, rows), columns=hidden, row_ranks=(ranks, ranks)),
        RankLayer(name="mlp.down_proj", parts=(hidden,), columns=rows, row_ranks=(1,), column_ranks=ranks),
    ]


def decoder_layers(config: Mapping[str, Any], ranks: int) -> Iterator[list[RankLayer]]:
    """Yield the quantized layers of each decoder layer.

    Args:
        config: of a model of a known family, as config.json has it.
        ranks: tensor-parallel size. Nothing comes where it does not divide the model, which vLLM refuses.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] or heads
    head_dim = config.get("head_dim") or hidden // heads
    experts, dense_only = _experts(config), config.get("mlp_only_layers") or ()
    widths = {False: config["intermediate_size"], True: config.get("moe_intermediate_size") or 0}
    for number in range(config["num_hidden_layers"]):
        sparse = experts > 0 and number not in dense_only and (number + 1) % (config.get("decoder_sparse_step") or 1) == 0
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads) or widths[sparse] % ranks:
            return
        yield attention(hidden, heads, kv_heads, head_dim, ranks) + mlp(hidden, widths[sparse], ranks, experts=sparse)


def _experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer; transformers 5 writes the second name, others the first."""
    return config.get("num_experts") or config.get("num_local_experts") or 0


def _known(config: Mapping[str, Any]) -> bool:
    """Whether the numbers are those of a known family, each a number: what else they may be, null too, its code decides."""
    family, experts = config.get("model_type"), _experts(config)
    if not isinstance(family, str) or family not in PACKED:
        return False
    numbers = [config.get(key) for key in (*_KEYS, *_KEYS_OF.get(family, ()))]
    optional = [config.get(key) for key in ("num_key_value_heads", "head_dim", "decoder_sparse_step")]
    numbers += [number for number in (*optional, experts or None) if number is not None]
    there = "num_key_value_heads" in config and isinstance(config.get("mlp_only_layers") or [], list)
    return there and all(map(positive_integer, numbers)) and bool(experts or family != "qwen3_moe")


def require_blocks_of_model(config: Mapping[str, Any], settings: FlashRLConfig, ranks: int) -> None:
    """Refuse a model that an engine would refuse, layer for layer and in its words; one of no known family is left to it.

    Args:
        config: as config.json has it.
        settings: precision, and which layers stay in BF16.
        ranks: tensor-parallel size.

    Raises:
        ConfigError: as ``require_whole_blocks``; or ``flashrl.ignore`` names some of what vLLM keeps in one weight.
    """
    if settings.precision.block is None or not _known(config):
        return
    packed, experts = PACKED[config["model_type"]], _experts(config)
    selection = LayerSelection(
        ignore=settings.ignore, keep_first=settings.keep_first_layers, keep_last=settings.keep_last_layers
    )
    for number, layers in enumerate(decoder_layers(config, ranks)):
        for layer in layers:
            name = f"model.layers.{number}.{layer.name}"
            inside = expert_parts(name, experts) if layer.name == "mlp.experts" else fused_parts(name, packed)
            if not selection.keeps(name, inside, config["num_hidden_layers"]):
                layer.require_whole_blocks(settings.precision, name)
