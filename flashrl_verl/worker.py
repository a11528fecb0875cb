# SPDX-License-Identifier: Apache-2.0
"""The actor worker the trainer starts: correction on the shard (``actor.py``), plus what the driver asks about a refit."""

import torch
from verl.single_controller.base.decorator import Dispatch, register

from flashrl_verl.actor import FlashRLActorWorker


class FlashRLWorker(FlashRLActorWorker):
    """Every rank of the actor's worker group. Methods return plain data."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def flashrl_refit_report(self) -> dict:
        """This rank's side of the last weight update: where it went, the receipt, and (on a replica's first rank) the
        engine workers' reports."""
        rollout = self.rollout
        return {
            "replica": rollout.replica_rank,
            "rank_in_replica": rollout.rollout_rank,
            "sent": rollout.sent_receipt,
            "reports": rollout.reports,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def flashrl_non_finite(self) -> list[str]:
        """Names of this rank's parameters whose local shard holds NaN or Inf; empty when all are finite."""
        names, flags = [], []
        for name, parameter in self.actor.engine.module.named_parameters():
            local = parameter.data.to_local() if hasattr(parameter.data, "to_local") else parameter.data
            if local.numel() and local.is_floating_point():
                names.append(name)
                flags.append(torch.stack(local.aminmax()).isfinite().all())
        if not flags:
            return []
        # Shards may be on the host (offload): gather the flags there, one copy a device.
        finite = torch.stack([flag.cpu() for flag in flags]).tolist() if len({f.device for f in flags}) > 1 else (
            torch.stack(flags).tolist()
        )
        return [name for name, ok in zip(names, finite, strict=True) if not ok]
