# SPDX-License-Identifier: Apache-2.0
"""One rank of a trainer: a tiny model under verl's FSDP2 wrapping, with ``flashrl.fp32_lm_head`` or without, one
backward."""

import os
from pathlib import Path
from typing import Any

import torch

SHAPE = (3, 12)
"""Sequences and tokens of a rank's batch."""


def batch(rank: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, SHAPE, generator=torch.Generator().manual_seed(100 + rank))


def token_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """verl's own, of every token after the first: [B, T - 1]."""
    from verl.utils.torch_functional import logprobs_from_logits

    return torch.stack([logprobs_from_logits(row[:-1], tokens[1:]) for row, tokens in zip(logits, ids, strict=True)])


def loss_of(log_probs: torch.Tensor) -> torch.Tensor:
    """A policy gradient's form: tokens weighted by advantages of both signs."""
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(7))
    return (log_probs.float() * weights).mean()


def run(rank: int, ranks: int, folder: str, name: str, changes: dict[str, Any], fp32: bool) -> None:
    """Write this rank's log-probs, and rank 0 the whole gradients, to ``folder/<rank>.pt``."""
    os.environ["VERL_PLATFORM"] = "cpu"
    from tiny_models import make
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from verl.utils.fsdp_utils import apply_fsdp2

    from flashrl_verl.quantization.lm_head import compute_head_in_fp32, computes_in_fp32

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    model = make(name, **changes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}, {})
    if fp32:
        compute_head_in_fp32(model)
    assert computes_in_fp32(model) is fp32
    ids = batch(rank, model.config.vocab_size)
    with torch.autocast("cpu", torch.bfloat16):  # as verl's FSDP engine does
        logits = model(input_ids=ids, use_cache=False).logits
        log_probs = token_log_probs(logits, ids)
        loss_of(log_probs).backward()
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    torch.save({"dtype": logits.dtype, "log_probs": log_probs.detach(), "grads": grads}, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()
