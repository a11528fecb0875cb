# SPDX-License-Identifier: Apache-2.0
"""The actor worker the trainer starts: correction on the shard (``actor.py``), plus what the driver asks about a refit."""

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import torch_functional
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from flashrl_verl import patches
from flashrl_verl.actor import FlashRLActorWorker
from flashrl_verl.checkpoint import ElasticCheckpointManager
from flashrl_verl.config import FlashRLConfig
from flashrl_verl.lm_head import compute_head_in_fp32, computes_in_fp32
from flashrl_verl.rollout.receipt import all_finite, to_host


class FlashRLWorker(FlashRLActorWorker):
    """Every rank of the actor's worker group. Methods return plain data."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """verl's; then checkpoints of another number of ranks can be loaded, and with ``flashrl.fp32_lm_head`` actor and
        reference compute their logits in FP32. Without flash-attn, log-probs are taken of many tokens at a time
        (``patches.py``).

        Raises:
            ConfigError: the model's head is of a kind that cannot.
            FlashRLError: another verl than those that were run.
        """
        patches.many_tokens_at_once(torch_functional)
        super().init_model()
        engine = self.actor.engine if getattr(self, "actor", None) is not None else None
        if engine is not None and type(engine.checkpoint_manager) is FSDPCheckpointManager:
            engine.checkpoint_manager = ElasticCheckpointManager.of(engine.checkpoint_manager)
        if FlashRLConfig.from_mapping((self.config.rollout.get("custom") or {}).get("flashrl", {})).fp32_lm_head:
            for trained in (getattr(self, "actor", None), getattr(self, "ref", None)):
                if trained is not None:
                    compute_head_in_fp32(trained.engine.module)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def flashrl_fp32_head(self) -> bool:
        """Whether this rank's actor computes its logits in FP32."""
        return computes_in_fp32(self.actor.engine.module)

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
    def flashrl_poison_next(self) -> None:
        """Have the engine overwrite its weights before it takes the next update."""
        self.rollout.poison_next = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def flashrl_non_finite(self) -> list[str]:
        """Names of this rank's parameters, and of their moments in the optimizer, whose local shard holds NaN or Inf."""
        module, optimizer = self.actor.engine.module, self.actor.engine.optimizer
        names, flags = [], []
        for name, parameter in module.named_parameters():
            moments = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for what, tensor in {name: parameter.data, **{f"{name} ({key})": value for key, value in moments.items()}}.items():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if isinstance(local, torch.Tensor) and local.numel() and local.is_floating_point():
                    names.append(what)
                    flags.append(all_finite(local))
        return [name for name, ok in zip(names, to_host(flags), strict=True) if not ok]
