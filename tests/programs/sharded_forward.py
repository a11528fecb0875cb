# SPDX-License-Identifier: Apache-2.0
"""A model with an 8-bit forward pass, sharded over ranks, beside the same in one piece."""

import functools

import torch
import torch.distributed
from tiny_models import make
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from flashrl_verl.settings import Precision
from flashrl_verl.trainer.forward_8bit import compute_in_8_bits, noted_codes


def sharded(model: torch.nn.Module, fsdp: int) -> torch.nn.Module:
    """As verl does, by decoder layers."""
    layers = model.model.layers
    if fsdp == 1:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers[0])})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def weights(model: torch.nn.Module, fsdp: int) -> dict[str, torch.Tensor]:
    """Whole ones, on every rank."""
    if fsdp == 1:
        with FullyShardedDataParallel.summon_full_params(model):
            return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}
    return {n: (p.full_tensor() if fsdp else p).detach().clone() for n, p in model.named_parameters()}


def train(name: str, rows: torch.Tensor, fsdp: int) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Two steps of gradient descent; returns the weights, and the digests of the codes of the first."""
    model = make(name)
    names = [n for n, _ in model.named_parameters() if n.endswith("_proj.weight")]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if fsdp:
        model = sharded(model, fsdp)
    compute_in_8_bits(model, names, Precision.INT8, Precision.BF16)
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, fsdp), noted_codes(model)


def on_a_rank(rank: int, ranks: int, folder: str, fsdp: int) -> None:
    """Its rows' part of the whole's gradient; ranks have as many tokens each, so that means of means are means."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    rows = torch.randint(3, 150, (4, 24), generator=torch.Generator().manual_seed(0))
    for name in ("qwen2.5", "llama3"):  # with biases; with a tied head
        whole, digests = train(name, rows, 0)
        mine, noted = train(name, rows[rank * 4 // ranks : (rank + 1) * 4 // ranks], fsdp)
        start = dict(make(name).named_parameters())
        assert noted == digests and mine.keys() == whole.keys()
        for key, value in whole.items():
            change = (value - start[key]).norm()
            assert change > 0 and (mine[key] - value).norm() < 0.01 * change, key
    torch.distributed.destroy_process_group()
