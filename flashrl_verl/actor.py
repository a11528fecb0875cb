# SPDX-License-Identifier: Apache-2.0
"""The actor's worker: importance weights and rejections are put beside the log-probs before verl's update, once per batch.

verl's batch reaches `update_actor` with `old_log_probs` and `rollout_log_probs`, and its `ppo_loss`
multiplies the policy loss by `rollout_is_weights` when it finds them, under the `response_mask`. So one override suffices:
compute the weights of this rank's rows and take what is rejected out of their mask, then let verl split the rows into
mini-batches and micro-batches. As on verl's driver, a rejected token still counts in the mean (`loss_mask` stays).

In bypass mode nothing is added: verl's `bypass_mode` loss weights and rejects by pi_theta / pi_rollout, which change with
every mini-batch.
"""

from __future__ import annotations

import torch
from tensordict import NonTensorStack, TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from flashrl_verl.correction import correct_shard
from flashrl_verl.correction_settings import CorrectionSettings
from flashrl_verl.errors import FlashRLError

_IMAGES = "multi_modal_inputs"
"""verl's name of the column of what an image processor made of each row; {} where there was no image."""


class FlashRLActorWorker(ActorRolloutRefWorker):
    """verl's hybrid worker, whose policy update corrects for the rollout's quantization; in bypass mode verl's loss does."""

    # verl binds only methods that carry its dispatch attributes, so the override registers again, under
    # verl's mesh. The profiler's and the routing-replay decorators are not repeated: they are on the method
    # that super() calls, and a second profiler inside a running one fails.
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
            ConfigError, FlashRLError: from `correct_shard`.
        """
        settings = CorrectionSettings.from_config(self.config.actor.policy_loss.get("rollout_correction"))
        group = self.actor.engine.get_data_parallel_group()
        metrics = attach_correction(data, settings, group, device=get_device_name())
        output = super().update_actor(without_objects(data))
        return None if output is None else extend_metrics(output, metrics)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: TensorDict) -> TensorDict | None:
        """verl's, without what it does not read.

        Args:
            data: this data-parallel rank's rows.

        Returns:
            verl's output; None on ranks that it does not collect from.
        """
        return super().compute_log_prob(without_objects(data))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict | None:
        """As ``compute_log_prob``, by the reference policy where there is one."""
        return super().compute_ref_log_prob(without_objects(data))


def without_objects(data: TensorDict) -> TensorDict:
    """Rows without the Python objects that only verl's driver and agent loops read: messages, rewards' extras, ids.

    verl's engines move every micro-batch to the device with all of its columns, and tensordict (0.10) makes a new Python object
    for each row of each of a dozen such columns, which takes longer than a small model's forward pass. Images' inputs are
    kept, where a row has any; so is everything that is one value for all rows, and a column with a tensor in it.

    Args:
        data: [B] rows; it is left alone.

    Returns:
        A TensorDict of the columns that are left, sharing their storage.
    """

    def is_left_out(key: str) -> bool:
        column = data.get(key)
        if not isinstance(column, NonTensorStack):
            return False
        rows = column.tolist()
        if any(isinstance(row, torch.Tensor) for row in rows):  # of a column that some rows lack: verl's engines shall see it
            return False
        return key != _IMAGES or not any(rows)

    return data.exclude(*[key for key in data.keys() if is_left_out(key)])


def attach_correction(
    data: TensorDict,
    settings: CorrectionSettings,
    group: torch.distributed.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Puts `rollout_is_weights` into `data`, shaped as its `old_log_probs`, takes rejected tokens out of its `response_mask`.

    See `correct_shard`. In bypass mode it leaves `data` alone.

    Args:
        data: `old_log_probs`, `rollout_log_probs`, `response_mask`: jagged [B, *] with equal row lengths, as
            verl's transfer queue delivers them, or padded [B, T].
        settings: level, bounds, normalization, rejections, bypass; without a level no weights are added.
        group: the data-parallel group, or None.
        device: where `group` communicates.

    Returns:
        The `rollout_corr/*` metrics of the whole batch; none in bypass mode, or when nothing is corrected and the rollout sent
        no log-probs.

    Raises:
        ConfigError, FlashRLError: from `correct_shard`; also when the three fields differ in row lengths.
    """
    if settings.bypass:
        return {}
    old, mask = data["old_log_probs"], data["response_mask"]
    rollout = data["rollout_log_probs"] if "rollout_log_probs" in data else None
    if rollout is None and settings.level is None and not settings.rejections:
        return {}  # calculate_log_probs=false and no correction: there is nothing to compare
    if not old.is_nested:
        correction = correct_shard(old, rollout, mask, settings, group, device)
        weights, keep = correction.weights, correction.keep
    else:
        offsets = [x.offsets() for x in (old, mask, rollout) if x is not None]
        for row, entries in enumerate(torch.stack([o.diff() for o in offsets], dim=1).tolist()):
            if len(set(entries)) > 1:
                raise FlashRLError(
                    f"old_log_probs, response_mask, rollout_log_probs have {entries} entries in row {row}: "
                    "every response token needs one in each. Check the agent loop's response_logprobs."
                )
        lengths = old.offsets().diff()
        filled = torch.arange(int(lengths.max()), device=old.device) < lengths.unsqueeze(-1)  # [B, T]
        padded = [None if x is None else _pad(x, filled) for x in (old, rollout, mask)]
        correction = correct_shard(*padded, settings, group, device)
        # Without these bounds PyTorch later pads rows to the *total* number of values.
        bounds = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
        weights, keep = (
            None if x is None else torch.nested.nested_tensor_from_jagged(x[filled], offsets=old.offsets(), **bounds)
            for x in (correction.weights, correction.keep)
        )
    if weights is not None:
        data["rollout_is_weights"] = weights
    if keep is not None:
        data["response_mask"] = keep.to(mask.dtype)
    return correction.metrics


def extend_metrics(output: TensorDict, metrics: dict[str, float]) -> TensorDict:
    """Adds `metrics` to the output of verl's update, in its own form: lists that the driver reduces by name.

    Every rank has the same values and verl's collection keeps the first rank's, so a list of one is the
    batch's value under each of `reduce_metrics`'s reductions (mean, max, min).
    """
    merged = {**tu.get(output, "metrics"), **{name: [value] for name, value in metrics.items()}}
    tu.assign_non_tensor_data(output, "metrics", merged)
    return output


def _pad(jagged: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Jagged [B, *] to [B, T], zero where `filled` [B, T] bool is false."""
    padded = jagged.values().new_zeros(filled.shape)
    padded[filled] = jagged.values()
    return padded
