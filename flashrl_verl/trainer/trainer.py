# SPDX-License-Identifier: Apache-2.0
"""The trainers: verl's V1 trainers with a verified refit, bounded dynamic sampling and correction on the actors.

verl's V1 ``PPOTrainerSync`` already is a DAPO trainer (``algorithm.filter_groups`` refills constant groups); only named
hooks are overridden here. Importing this module registers ``trainer.v1.trainer_mode=flashrl``, and
``flashrl_colocate_async`` on verl's ``PPOTrainerColocateAsync``, which samples the next step's responses while this
step waits for its longest ones, and carries them over the update.
"""

import inspect
import logging
import math
import numbers
import time
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer

from flashrl_verl.correction.batch import LAG
from flashrl_verl.errors import DynamicSamplingError, FlashRLError, GuardError, ResponseError, listed
from flashrl_verl.input_files import check_files, last_step, resumes_from
from flashrl_verl.launch import check_cluster
from flashrl_verl.refit.receipt import verify_ranks
from flashrl_verl.refit.self_check import require_same, sleeps_between_steps
from flashrl_verl.run_environment import settle_packages
from flashrl_verl.trainer import refill  # as a whole: whoever imports it first is here while it is half read
from flashrl_verl.trainer.atomic_write import write_atomically
from flashrl_verl.trainer.guard import Guard
from flashrl_verl.trainer.metrics import (
    MetricsFile,
    describe_never_quantized,
    describe_rollout,
    describe_unrotated,
    metrics_path,
    refit_metrics,
    summarize_layers,
)
from flashrl_verl.trainer.mini_batches import even_order, length_variation
from flashrl_verl.trainer.rewards import RewardWatch, check_rewards
from flashrl_verl.trainer.worker_watch import WorkerWatch
from flashrl_verl.upstream.patches import choose_ports
from flashrl_verl.upstream.versions import check_versions
from flashrl_verl.validation import validate_config

# Under "verl", whose handler verl keeps apart from the root logger: imported libraries silence that one.
log = logging.getLogger("verl.flashrl")

_POLL_INTERVAL_S = 0.1
"""How often the replay buffer looks for finished groups, seconds. verl's 2 s would be added to most steps of a small
run."""


class FlashRLMixin:
    """What both trainers have in common. ``config`` is verl's, composed with ``flashrl_verl.configs``.

    Raises:
        ConfigError: from the constructor, before anything is started.
        RefitError, DynamicSamplingError, GuardError, FlashRLError: while training; the last checkpoint stays whole.
    """

    MODE: ClassVar[str]
    """verl's name of the mode."""

    def __init__(self, config: DictConfig):
        self.flashrl = validate_config(config)
        check_cluster(config)
        check_files(config)
        settle_packages(config)  # here too, for verl's own entry point
        for finding in check_versions():
            if finding.status != "ok":
                log.warning("%s", finding)
        self.guard = Guard.from_config(config, self.flashrl)
        self._composed = OmegaConf.to_yaml(config)
        # The actors compute the correction on their shards; without this node verl's driver does not do it again.
        # They got their own copy through actor.policy_loss.rollout_correction. In bypass mode the driver needs it to
        # put the rollout's log-probs for the old ones, and computes nothing either.
        if not config.algorithm.rollout_correction.get("bypass_mode"):
            with open_dict(config):
                config.algorithm.rollout_correction = None
        check_rewards(config)
        self._seed = config.actor_rollout_ref.actor.data_loader_seed
        self._tracking = None
        self._own_file = False
        self._prompts_this_step: int | None = None  # before the first step: what async mode starts with is no refill
        super().__init__(config)

    # ---- verl's hooks, in the order they are called ----

    def _build_replay_buffer(self):
        # What verl compares with, here and later; our registered name is not in its lists.
        self.trainer_mode = self.MODE
        replay_buffer = super()._build_replay_buffer()
        assert hasattr(replay_buffer, "poll_interval"), "verl renamed the replay buffer's poll interval"
        if type(replay_buffer) is ReplayBuffer and self.flashrl.sampling.refill:  # or it is the user's own
            # verl keeps every argument under its own name.
            arguments = {name: getattr(replay_buffer, name) for name in inspect.signature(ReplayBuffer).parameters}
            limit = self.flashrl.max_num_gen_batches * self.config.data.train_batch_size or math.inf
            replay_buffer = refill.RefillBuffer(seed=self._seed, max_prompts=limit, **arguments)
        replay_buffer.poll_interval = _POLL_INTERVAL_S
        return replay_buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        from flashrl_verl.trainer.worker import FlashRLWorker

        choose_ports(trainer_base)
        for role in (Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(FlashRLWorker)

    def on_init_end(self) -> None:
        super().on_init_end()
        metrics = self._verify_refit()
        replicas = self._ask_servers("flashrl_layers")
        self._layer_metrics = summarize_layers([worker for replica in replicas for worker in replica])
        log.info(describe_rollout(self.flashrl.precision.value, self._layer_metrics, metrics))
        first = replicas[0][0]
        for line in filter(None, (describe_never_quantized(first), describe_unrotated(first))):
            log.info(line)
        if self.flashrl.self_check:
            self._self_check()

    @property
    def logger(self):
        """verl's ``Tracking``; its file back end is replaced when ``fit`` creates it, so that resuming appends."""
        return self._tracking

    @logger.setter
    def logger(self, tracking) -> None:
        if self._own_file:
            path = metrics_path(self.config.trainer.project_name, self.config.trainer.experiment_name)
            tracking.logger["file"] = MetricsFile(path, self.global_steps)
        self._tracking = tracking

    def fit(self, agent_loop_manager) -> None:
        backends = self.config.trainer.logger
        backends = [backends] if isinstance(backends, str) else list(backends)
        self._own_file = "file" in backends
        if self._own_file:
            with open_dict(self.config):
                self.config.trainer.logger = [b for b in backends if b != "file"]
        # A manager of the user's own need not have workers.
        workers = [*getattr(agent_loop_manager, "agent_loop_workers", ()), *self.actor_rollout_wg.workers]
        workers += self.reward_loop_manager.reward_loop_workers
        watch = WorkerWatch(workers, self._how_to_resume)
        own = self.config.reward.custom_reward_function
        self._rewards = RewardWatch(
            self.reward_loop_manager.reward_loop_workers,
            f"{own.name} of {own.path}" if own.path else "verl's",
            self.flashrl.failed_responses_max,
            self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n,
        )
        poll = self.replay_buffer._wait_for_next_poll

        def watched_poll(*args: Any, **kwargs: Any) -> float:
            watch.look()
            self._rewards.look()
            return poll(*args, **kwargs)

        self.replay_buffer._wait_for_next_poll = watched_poll  # a sampler of the user's own too
        self._count_lost_responses()
        try:
            super().fit(agent_loop_manager)
        except Exception as error:
            if (cause := watch.cause(error)) is not error:
                raise cause from error
            raise
        finally:
            # Ray would end their workers later, and torch tell that as an error behind a run that succeeded.
            self.train_dataloader_it = self.train_dataloader = self.val_dataloader = None

    def _count_lost_responses(self) -> None:
        """Where verl takes groups, and where it throws failed ones away."""
        buffer, rollout = self.replay_buffer, self.config.actor_rollout_ref.rollout
        materialize, evict = buffer._materialize_batch, buffer._evict_terminal_groups

        def whole_batch(partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]):
            there = {key: tag for key, tag in partition_snapshot.items() if tag}  # else its data never came
            each = rollout.val_kwargs.n if partition_id == "val" else rollout.n
            failed = buffer.failure_keys[partition_id]
            if not self._rewards.count_lost(selected_prompt_uids, failed, there, each):
                self._rewards.check_lost(nothing=True)
            return materialize(partition_id, selected_prompt_uids, there)

        def counted_eviction(global_steps: int, partition_id: str, eviction_reasons: tuple):
            failed = eviction_reasons[2]
            self._rewards.count_lost(failed, failed, buffer.partitions[partition_id], rollout.n)
            return evict(global_steps, partition_id, eviction_reasons)

        buffer._materialize_batch, buffer._evict_terminal_groups = whole_batch, counted_eviction

    def _load_checkpoint(self) -> None:
        if folder := resumes_from(self.config):
            self.guard.last_checkpoint = folder
        super()._load_checkpoint()

    def step(self, metrics: dict, timing_raw: dict):
        batch = super().step(metrics, timing_raw)
        self._step_metrics = metrics
        self._check_guard()  # before verl saves: what it stops is in no checkpoint
        return batch

    def prepare_step(self) -> dict:
        self._generated_before = self._ask_servers("flashrl_generated_tokens")
        self._prompts_this_step = self.config.data.train_batch_size
        return super().prepare_step()

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        if self._prompts_this_step is None:
            return super()._add_prompts_to_generate(num_prompts)
        self._prompts_this_step += num_prompts
        limit = self.flashrl.max_num_gen_batches
        batch = self.config.data.train_batch_size
        if limit and self._prompts_this_step > limit * batch:
            metric = self.config.algorithm.filter_groups.metric
            why = "the policy solves all or none of them, or they have failed, which the first error in the log says"
            self._rewards.ask(whole=True)
            if self._rewards.unrewarded:
                why = "no response had a reward, of which a warning in the log shows one"
            raise DynamicSamplingError(
                f"step {self.global_steps}: dynamic sampling drew more than {limit} x {batch} prompts and still lacks "
                f"a batch of groups whose {metric!r} differs within the group: {why}. Check the reward and the data, "
                "raise actor_rollout_ref.rollout.n, or raise flashrl.max_num_gen_batches (0: no limit)"
            )
        return super()._add_prompts_to_generate(num_prompts)

    def _balance_batch(self, batch, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False):
        batch = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        mini_batches, rest = divmod(len(batch), actor.ppo_mini_batch_size * rollout.n)
        if rest:  # verl pads to mini-batches only where the actor learns: not while the critic warms up
            return batch
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        if self.flashrl.sampling.even_mini_batches:
            lengths = [tag["seq_len"] for tag in batch.tags]
            padding = [bool(tag.get("is_padding")) for tag in batch.tags]
            batch.reorder(even_order(lengths, padding, mini_batches, ranks, f"{self._seed} {self.global_steps}"))
        lengths = [tag["seq_len"] for tag in batch.tags]
        metrics["flashrl/mini_batch_length_variation"] = length_variation(lengths, mini_batches, ranks)
        tokens = torch.tensor(lengths).view(ranks, -1).sum(1)  # verl's metrics, of the order as it is now
        metrics[f"{logging_prefix}/balanced_min"] = float(tokens.min())
        metrics[f"{logging_prefix}/balanced_max"] = float(tokens.max())
        return batch

    def on_validate_end(self) -> None:
        super().on_validate_end()
        self._rewards.end_validation()

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self._reward_metrics = self._rewards.end_step()
        now = self._ask_servers("flashrl_generated_tokens")
        self._generated_tokens = [after - before for after, before in zip(now, self._generated_before, strict=True)]

    def _update_actor(self, batch, metrics: dict):
        batch = super()._update_actor(batch, metrics)
        for key in [k for k in metrics if k.startswith("actor/rollout_corr/")]:
            metrics[key.removeprefix("actor/")] = metrics.pop(key)  # verl prefixes whatever the actor returns
        return batch

    def _save_checkpoint(self) -> None:
        # verl saves before the refit that would notice: look first, so that no checkpoint holds NaN.
        bad = sorted({name for names in self.actor_rollout_wg.flashrl_non_finite() for name in names})
        if bad:
            raise FlashRLError(
                f"step {self.global_steps}: the actor's update left NaN or Inf in {len(bad)} tensors "
                f"({listed(bad)}); no checkpoint was saved from it. Resume from the last one with a lower "
                "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.optim.clip_grad"
            )
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        # First: verl ends with the record that makes it the last checkpoint.
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.yaml", self._composed.encode())  # for `flashrl eval` and `flashrl export`
        super()._save_checkpoint()
        if self.guard.healthy:
            self.guard.last_checkpoint = folder

    def on_step_end(self) -> None:
        super().on_step_end()
        self._after_update()

    def _after_update(self) -> None:
        refit = self._verify_refit()
        self._check_guard(refit)
        self._pending_sync_metrics = {**refit, **self._layer_metrics, **self.guard.metrics()}

    def _compute_metrics(self, batch, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        # Of all engines, dropped groups included; rewards in the agent loop and polling are in verl's phase too.
        if "gen" in timing_raw:
            metrics["flashrl/tokens_per_second_gen"] = sum(self._generated_tokens) / timing_raw["gen"]
        metrics.update(self._reward_metrics)
        if not math.isfinite(metrics.get("critic/score/mean", 0.0)):  # CheckedRewardManager has not seen it
            raise ResponseError(
                f"step {self.global_steps}: a reward is not a finite number, and came from no reward function but from "
                "an agent loop or a reward model. verl leaves out every mini-batch with one. Remedy: mend that reward"
            )

    # ---- ours ----

    def _how_to_resume(self) -> str:
        folder, every = self.config.trainer.default_local_dir, self.config.trainer.save_freq
        if last_step(Path(folder)) is None:
            return f"Nothing was saved yet: set trainer.save_freq, in steps (now {every})"
        return f"Rerun with trainer.resume_mode=auto, on as many nodes, to resume from the last checkpoint in {folder}"

    def _check_guard(self, refit: dict | None = None) -> None:
        """Have the guard check the step; what it stops is logged first, as verl logs at the end of a step."""
        metrics = {**self._step_metrics, **(refit or {})}
        try:
            self.guard.check(self.global_steps, metrics, refitted=refit is not None)
        except GuardError:
            metrics |= self.guard.metrics()
            self.logger.log(
                data={k: v for k, v in metrics.items() if isinstance(v, numbers.Number)}, step=self.global_steps
            )
            raise

    def _ask_servers(self, method: str, *args) -> list:
        """Call ``method`` on the first server of every replica."""
        replicas = self.llm_server_manager.get_replicas()
        return ray.get([getattr(replica.server_handle, method).remote(*args) for replica in replicas])

    def _verify_refit(self) -> dict[str, float]:
        """Compare what every trainer rank sent with what arrived at the engine worker beside it; returns
        ``flashrl/*`` metrics.

        The engines are asked directly, not through the adapter, so an update that was never sent is noticed too.
        """

        def ask(whole: bool) -> tuple[list[dict], list[list[dict]]]:
            return self.actor_rollout_wg.flashrl_refit_report(whole), self._ask_servers("flashrl_receipts", whole)

        ranks, arrived = ask(False)
        verify_ranks(ranks, arrived, self.global_steps, lambda: ask(True))
        reports = [report for rank in ranks for report in rank["reports"]]
        return {**refit_metrics(reports, ranks[0]["sent"]), "flashrl/receipts_verified": len(ranks)}

    def _self_check(self) -> None:
        """See ``self_check.py``: sleep, poison, the same weights again, and nothing may have changed."""
        started = time.perf_counter()
        sleeps = sleeps_between_steps(self.config.actor_rollout_ref.rollout)
        before = self._ask_servers("flashrl_state")
        self.actor_rollout_wg.flashrl_self_check_next()
        if sleeps:
            self.checkpoint_manager.sleep_replicas()
        self.checkpoint_manager.update_weights(self.global_steps)
        self._verify_refit()
        event = ("sleep, " if sleeps else "") + "poisoned weights and the same weights again"
        require_same(before, self._ask_servers("flashrl_state"), event)
        self._layer_metrics["flashrl/self_check_seconds"] = time.perf_counter() - started
        log.info(
            "[flashrl] self-check passed in %.1f s: after %s, storage, addresses and %d greedy tokens are the same",
            time.perf_counter() - started,
            event,
            len(before[0].token_ids),
        )


@register_trainer("flashrl")
class FlashRLTrainer(FlashRLMixin, PPOTrainerSync):
    """Generation, then training."""

    MODE = "sync"


@register_trainer("flashrl_colocate_async")
class FlashRLAsyncTrainer(FlashRLMixin, PPOTrainerColocateAsync):
    """Responses that are not finished when a batch is full are stopped, and go on after the update with its weights:
    each token keeps the log-prob of the weights that sampled it. How old a trajectory may be is
    ``trainer.v1.sampler.max_off_policy_threshold``."""

    MODE = "colocate_async"

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        # verl saves before it clears the batch of the step: rows that have no prompt, which nothing would ever take.
        rows = (tq.kv_list("train") or {}).get("train", {})
        if trained := [key for key in rows if key.split("_")[0] not in rows]:
            tq.kv_clear(keys=trained, partition_id="train")
            log.info("%d rows of the checkpoint had been trained on; they are dropped", len(trained))

    def on_step_end(self) -> None:
        # verl's method updates and resumes in one: nothing may be sampled from weights that have not been verified.
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.checkpoint_manager.update_weights(self.global_steps)
        self._after_update()
        self.checkpoint_manager.resume_generation_replicas()

    def _balance_batch(self, batch, metrics: dict, *args, **more):
        batch = super()._balance_batch(batch, metrics, *args, **more)
        # Engines hold the weights of the step before; a trajectory's least version is that of its first tokens.
        lags = torch.tensor([[self.global_steps - 1 - tag["min_global_steps"]] for tag in batch.tags])
        tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict({LAG: lags}, batch_size=len(batch))
        )
        return batch
