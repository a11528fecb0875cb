# SPDX-License-Identifier: Apache-2.0
"""The actor's worker: verl's, which corrects for the rollout's quantization, and what the driver asks of a refit."""

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils, torch_functional
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine_workers import ActorRolloutRefWorker

from flashrl_verl.correction.batch import attach_correction
from flashrl_verl.correction.settings import CorrectionSettings
from flashrl_verl.fp32_head import compute_head_in_fp32
from flashrl_verl.refit.receipt import brief
from flashrl_verl.refit.scan import non_finite
from flashrl_verl.settings import FlashRLConfig
from flashrl_verl.trainer import varlen_attention
from flashrl_verl.trainer.log_probs import log_probs
from flashrl_verl.upstream import patches


class FlashRLWorker(ActorRolloutRefWorker):
    """Every rank of the actor's worker group. Methods of our own return plain data."""

    # verl binds only methods that carry its dispatch attributes, so every override registers again, under verl's mesh.
    # The profiler's and the routing-replay decorators are not repeated: they are on the method that super() calls, and
    # a second profiler inside a running one fails.

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """verl's; then with ``flashrl.fp32_lm_head`` actor and reference compute their logits in FP32. Without
        flash-attn, log-probs are taken of many tokens at a time, and attention can be ours. Micro-batches are made of
        the rows that they select (``patches.py``).

        Raises:
            ConfigError: the model's head is of a kind that cannot.
            FlashRLError: another verl than those that were run.
        """
        patches.patch_logprobs_from_logits(torch_functional, log_probs)
        patches.patch_index_select(tensordict_utils)
        patches.keep_buffers(FSDPEngine)
        varlen_attention.register()
        super().init_model()
        if FlashRLConfig.of_rollout(self.config.rollout).fp32_lm_head:
            for trained in (getattr(self, "actor", None), getattr(self, "ref", None)):
                if trained is not None:
                    compute_head_in_fp32(trained.engine.module)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        """Corrects `data` unless in bypass mode, updates the policy, and adds the correction's metrics to verl's.

        Args:
            data: this data-parallel rank's rows: `old_log_probs`, `rollout_log_probs`, `response_mask` jagged
                [B, *], besides what verl's update needs.

        Returns:
            verl's output (None on ranks that it does not collect from), its `metrics` extended by
            `rollout_corr/*`, which in bypass mode come from verl's loss; verl's driver prefixes them with `actor/`.

        Raises:
            ConfigError, FlashRLError: from `attach_correction`.
        """
        settings = CorrectionSettings.from_config(self.config.actor.policy_loss.get("rollout_correction"))
        group = self.actor.engine.get_data_parallel_group()
        metrics = attach_correction(data, settings, group, device=get_device_name())
        output = super().update_actor(data)
        if output is not None:
            # Every rank has the same values and verl's collection keeps the first rank's: a list of one is the batch's
            # value, however the driver reduces it.
            metrics = {name: [value] for name, value in metrics.items()}
            merged = {**tensordict_utils.get(output, "metrics"), **metrics}
            tensordict_utils.assign_non_tensor_data(output, "metrics", merged)
        return output

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def flashrl_refit_report(self, whole: bool = False) -> dict:
        """This rank's side of the last weight update: where it went, the receipt, brief or whole, and (on a replica's
        first rank) the engine workers' reports."""
        rollout = self.rollout
        return {
            "replica": rollout.replica_rank,
            "rank_in_replica": rollout.rollout_rank,
            "sent": rollout.sent_receipt if whole else brief(rollout.sent_receipt),
            "reports": rollout.reports,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def flashrl_self_check_next(self) -> None:
        """Have the engine look for layers with stale copies before it takes the next update."""
        self.rollout.self_check_next = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def flashrl_non_finite(self) -> list[str]:
        """Names of this rank's parameters, and of their moments in the optimizer, whose local shard holds NaN or
        Inf."""
        module, optimizer = self.actor.engine.module, self.actor.engine.optimizer
        found = {}
        for name, parameter in module.named_parameters():
            moments = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for what, tensor in {
                name: parameter.data,
                **{f"{name} ({key})": value for key, value in moments.items()},
            }.items():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if isinstance(local, torch.Tensor) and local.is_floating_point():
                    found[what] = local
        return non_finite(found)
