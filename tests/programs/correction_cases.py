# SPDX-License-Identifier: Apache-2.0
"""Seeded batches for the tests of the correction, verl's answer to them, and one rank of a group.

Run as a file it is one rank: `python correction_cases.py RANK WORLD_SIZE STORE BATCHES OUTPUT`.
"""

import sys
from datetime import timedelta
from typing import NamedTuple

import torch

from flashrl_verl.correction.batch import correct_shard
from flashrl_verl.correction.settings import CorrectionSettings
from flashrl_verl.errors import FlashRLError

SEEDS = range(100)

NODES = {
    "token TIS": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "token TIS normalized": {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": True,
    },
    "token IcePop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "sequence TIS": {"rollout_is": "sequence", "rollout_is_threshold": 4.0},
    "sequence TIS normalized": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 4.0,
        "rollout_is_batch_normalize": True,
    },
    "sequence IcePop": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
    "metrics only": {"rollout_is": None},
    **{
        f"reject {name}": {"rollout_is": None, "rollout_rs": name, "rollout_rs_threshold": threshold}
        for name, threshold in (
            ("token_k1", "0.6_1.7"),
            ("token_k2", 0.1),
            ("token_k3", "0.1"),
            ("seq_sum_k1", 2.5),
            ("seq_sum_k2", 1.0),
            ("seq_sum_k3", 1.0),
            ("seq_mean_k1", "0.98_1.02"),
            ("seq_mean_k2", 0.01),
            ("seq_mean_k3", 0.01),
            ("seq_max_k2", 0.1),
            ("seq_max_k3", 0.1),
        )
    },
    "token TIS, two rejections": {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "token_k1, seq_mean_k3,token_k1",
        "rollout_rs_threshold": "0.5_2.0,0.02",
    },
    "sequence IcePop normalized, rejections with one bound": {
        "rollout_is": "sequence",
        "rollout_is_threshold": "0.5_5.0",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "seq_sum_k3,seq_max_k2",
        "rollout_rs_threshold": 0.3,
    },
}
"""Keys of `algorithm.rollout_correction` by the name of the variant."""


class Batch(NamedTuple):
    """Padded [B, T]; log-probs are zero past a row's length, as after verl's `to_padded_tensor`."""

    old: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor

    def shard(self, rows: slice) -> "Batch":
        """The batch of these rows, padded no further than their longest."""
        width = int(self.lengths[rows].max())
        return Batch(*(x[rows, :width] for x in self[:3]), self.lengths[rows])


def random_batch(seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Draws a batch: holes in masks, empty responses, log-ratios up to +-40, now and then a single token.

    Row 0 stays close to on-policy, so that IcePop never drops the whole batch (verl divides by zero then); it
    may well drop whole shards.
    """
    random = torch.Generator().manual_seed(seed)
    rows, width = (1, 1) if seed % 10 == 9 else (4 + seed % 6, 1 + 7 * (seed % 5))
    lengths = torch.randint(1, width + 1, (rows,), generator=random)
    mask = torch.arange(width) < lengths.unsqueeze(-1)
    mask &= torch.rand(rows, width, generator=random) < (1.0, 0.7)[seed % 2]
    mask[1:][torch.rand(rows - 1, generator=random) < 0.25] = False  # truncated answers, padding rows
    mask[0, 0] = True
    scale = torch.tensor([0.0, 0.02, 0.5, 5.0, 40.0])[torch.randint(0, 5, (rows, 1), generator=random)]
    scale[0] = 0.02
    log_ratio = (2 * torch.rand(rows, width, generator=random) - 1) * scale
    old = -4 * torch.rand(rows, width, generator=random)
    filled = torch.arange(width) < lengths.unsqueeze(-1)
    old, log_ratio = old.to(dtype) * filled, log_ratio.to(dtype) * filled
    return Batch(old, old - log_ratio, mask.long(), lengths)


class Answer(NamedTuple):
    """Of verl's driver or of ours, for the whole batch or a shard."""

    weights: torch.Tensor | None
    mask: torch.Tensor
    """[B, T] bool, after rejection."""
    metrics: dict[str, float]


def verl_answer(batch: Batch, node: dict) -> Answer:
    """What verl's driver computes from the whole batch."""
    from verl.protocol import DataProto
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    data = DataProto.from_dict(
        tensors={"old_log_probs": batch.old, "rollout_log_probs": batch.rollout, "response_mask": batch.mask}
    )
    data, metrics = compute_rollout_correction_and_add_to_batch(data, RolloutCorrectionConfig(**node))
    return Answer(data.batch.get("rollout_is_weights", None), data.batch["response_mask"].bool(), metrics)


def split_rows(rows: int, shards: int, seed: int) -> list[slice]:
    """Cuts `rows` into `shards` contiguous, uneven parts of at least one row."""
    order = torch.randperm(rows - 1, generator=torch.Generator().manual_seed(seed))
    edges = [0, *sorted((order[: shards - 1] + 1).tolist()), rows]
    return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def run_rank(rank: int, world_size: int, store: str, batches: int) -> dict:
    """Corrects this rank's shard of the first batches under every variant, in a gloo group.

    Returns:
        Answers by (seed, name of the variant), and the error that each fault causes on this rank: "NaN" on the last
        rank alone, "missing" log-probs and an "empty" mask on all.
    """
    import torch.distributed as dist

    # Past the time it takes to import verl on a busy machine.
    timeout = timedelta(seconds=400)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    group = dist.group.WORLD
    try:
        answers = {}
        for seed in SEEDS[:batches]:
            batch = random_batch(seed)
            if len(batch.old) < world_size:
                continue
            shard = batch.shard(split_rows(len(batch.old), world_size, seed)[rank])
            for name, node in NODES.items():
                found = correct_shard(*shard[:3], CorrectionSettings.from_config(node), group)
                mask = shard.mask if found.kept is None else found.kept
                answers[seed, name] = Answer(found.weights, mask.bool(), found.metrics)
        old, rollout = torch.zeros(2, 2), torch.zeros(2, 2)
        if rank == world_size - 1:
            rollout[1, 0] = torch.nan
        faults = {"NaN": (old, rollout, old + 1), "missing": (old, None, old + 1), "empty": (old, old, old)}
        for fault, fields in faults.items():
            try:
                correct_shard(*fields, CorrectionSettings.from_config(NODES["token TIS"]), group)
            except FlashRLError as error:
                answers[fault] = str(error)
        return answers
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    torch.save({key: answer if isinstance(key, str) else tuple(answer) for key, answer in answers.items()}, sys.argv[5])
