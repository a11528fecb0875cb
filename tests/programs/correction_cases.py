# SPDX-License-Identifier: Apache-2.0
"""Seeded batches for the tests of the correction, and verl's answer to them."""

from typing import NamedTuple

import torch


def node(level=None, threshold=None, rejections=None, bounds=None, normalize=False) -> dict:
    return {
        "rollout_is": level,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": rejections,
        "rollout_rs_threshold": bounds,
    }


CRITERIA = {
    **{
        "token_k1": "0.6_1.7",
        "token_k2": 0.1,
        "token_k3": "0.1",
        "seq_sum_k1": 2.5,
        "seq_sum_k2": 1.0,
        "seq_sum_k3": 1.0,
    },
    **{"seq_mean_k1": "0.98_1.02", "seq_mean_k2": 0.01, "seq_mean_k3": 0.01, "seq_max_k2": 0.1, "seq_max_k3": 0.1},
}
NODES = {
    "token TIS": node("token", 2.0),
    "token TIS normalized": node("token", 2.0, normalize=True),
    "token IcePop": node("token", "0.5_5.0"),
    "sequence TIS": node("sequence", 4.0),
    "sequence TIS normalized": node("sequence", 4.0, normalize=True),
    "sequence IcePop": node("sequence", "0.5_5.0"),
    "metrics only": node(),
    **{f"reject {name}": node(rejections=name, bounds=bound) for name, bound in CRITERIA.items()},
    "token TIS, two rejections": node("token", 2.0, "token_k1, seq_mean_k3,token_k1", "0.5_2.0,0.02"),
    "sequence IcePop normalized, one bound": node("sequence", "0.5_5.0", "seq_sum_k3,seq_max_k2", 0.3, normalize=True),
}
"""Keys of `algorithm.rollout_correction` by the name of the variant."""


class Batch(NamedTuple):
    """Padded [B, T]; log-probs are zero past a row's length, as after verl's `to_padded_tensor`."""

    old: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor


def random_batch(seed: int, rows: int = 0, width: int = 0, scales=(0.0, 0.02, 0.5, 5.0, 40.0)) -> Batch:
    """Draws a batch: holes in masks, empty responses, log-ratios up to the scale, now and then a single token.

    Row 0 stays close to on-policy, so that IcePop never drops the whole batch (verl divides by zero then); it
    may well drop whole shards.
    """
    random = torch.Generator().manual_seed(seed)
    if not rows:
        rows, width = (1, 1) if seed % 10 == 9 else (4 + seed % 6, 1 + 7 * (seed % 5))
    lengths = torch.randint(1, width + 1, (rows,), generator=random)
    filled = torch.arange(width) < lengths.unsqueeze(-1)
    mask = filled & (torch.rand(rows, width, generator=random) < (1.0, 0.7)[seed % 2])
    mask[1:][torch.rand(rows - 1, generator=random) < 0.25] = False  # truncated answers, padding rows
    mask[0, 0] = True
    scale = torch.tensor(scales)[torch.randint(0, len(scales), (rows, 1), generator=random)]
    scale[0] = 0.02
    old = -4 * torch.rand(rows, width, generator=random) * filled
    log_ratio = (2 * torch.rand(rows, width, generator=random) - 1) * scale * filled
    return Batch(old, old - log_ratio, mask.long(), lengths)


class Answer(NamedTuple):
    """Of verl's driver, for the whole batch."""

    weights: torch.Tensor | None
    mask: torch.Tensor
    """[B, T] 0/1, after rejection."""
    metrics: dict[str, float]
    """Of the rows with a token."""


def verl_answer(batch: Batch, node: dict) -> Answer:
    from verl.protocol import DataProto
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    def answer(rows: torch.Tensor) -> tuple[DataProto, dict[str, float]]:
        fields = {"old_log_probs": batch.old, "rollout_log_probs": batch.rollout, "response_mask": batch.mask}
        data = DataProto.from_dict(tensors={name: field[rows] for name, field in fields.items()})
        return compute_rollout_correction_and_add_to_batch(data, RolloutCorrectionConfig(**node))

    data, _ = answer(torch.ones(len(batch.mask), dtype=torch.bool))
    _, metrics = answer(batch.mask.any(-1))
    return Answer(data.batch.get("rollout_is_weights", None), data.batch["response_mask"].long(), metrics)
