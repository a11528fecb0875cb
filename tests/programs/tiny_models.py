# SPDX-License-Identifier: Apache-2.0
"""Small random models of the shapes that users train, as Hugging Face modules, and their weights as verl sends them.

Hidden 136 and intermediate 344 are divided by no kernel's tile and no rotation; 352 is by 32; 2 KV heads under 4 heads
make q, k and v differ in rows.
"""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 160
LAYERS = 2

_COMMON = dict(
    vocab_size=VOCAB,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.05,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)

CONFIGS: dict[str, PretrainedConfig] = {
    # Biases on q, k and v.
    "qwen2.5": Qwen2Config(**_COMMON, hidden_size=128, intermediate_size=344),
    # Norms on q and k; heads wider than hidden / heads; no dimension is a multiple of 16.
    "qwen3": Qwen3Config(**_COMMON, hidden_size=136, intermediate_size=344, head_dim=64),
    # Embeddings and lm_head are one tensor.
    "llama3": LlamaConfig(**{**_COMMON, "tie_word_embeddings": True}, hidden_size=128, intermediate_size=352),
    "mistral": MistralConfig(**_COMMON, hidden_size=128, intermediate_size=320, sliding_window=None),
    # q, k, v and gate, up fused on disk.
    "phi3": Phi3Config(**_COMMON, hidden_size=128, intermediate_size=344, sliding_window=None),
    "qwen3-moe": Qwen3MoeConfig(
        **_COMMON,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=96,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}


def make(name: str, seed: int = 0, **changes: int) -> PreTrainedModel:
    """A random FP32 model; every weight differs from zero and norms from one, so that no load can be forgotten unseen.

    Args:
        name: one of ``CONFIGS``.
        seed: of the weights.
        **changes: to the configuration.
    """
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    for key, value in changes.items():
        assert hasattr(config, key), key
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def wire(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What the trainer sends: BF16 copies of its FP32 masters under checkpoint names; a router stays FP32, as in the
    adapter."""
    import engines  # noqa: F401 - chooses verl's platform, which verl reads once

    from benchmarks.models import sent_tensors
    from flashrl_verl.refit.sender import cast_for_rollout

    named = ((name, tensor.detach().clone()) for name, tensor in sent_tensors(model))
    return dict(cast_for_rollout(named, torch.bfloat16))


@torch.no_grad()
def log_probs(model: PreTrainedModel, sequences: list[list[int]]) -> list[list[float]]:
    """Of every token after the first of each sequence, by the model in BF16."""
    model, found = copy.deepcopy(model).bfloat16(), []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        logits = model(input_ids=ids).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1).tolist())
    return found
