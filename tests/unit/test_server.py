# SPDX-License-Identifier: Apache-2.0
"""Replicas of the rollout: their precisions and names."""

from flashrl_verl.rollout.server import FlashRLReplica
from flashrl_verl.settings import FlashRLConfig
from flashrl_verl.tools.recipe_process import compose


def test_replicas_that_share_a_configuration_take_the_precisions_of_the_mixture():
    from verl.utils.config import omega_conf_to_dataclass

    words = ["trainer.n_gpus_per_node=2", "flashrl.bf16_replica_fraction=0.5", "flashrl.guard.action=stop"]
    composed = compose(["experiment=smoke", *words]).actor_rollout_ref.rollout
    for config in (
        composed,
        omega_conf_to_dataclass(composed),
    ):  # as verl hands it over, and as an object that all share
        replicas = [FlashRLReplica(rank, config, None, gpus_per_node=2) for rank in (0, 1)]
        for replica in replicas:
            replica.take_precision(2)
        taken = [FlashRLConfig.from_mapping(replica.config.custom["flashrl"]) for replica in replicas]
        assert [settings.precision.value for settings in taken] == ["int8", "bf16"]
        assert all(settings.bf16_replica_fraction == 0 and settings.guard.action.value == "stop" for settings in taken)
        assert all(replica.config.logprobs_mode == config.logprobs_mode for replica in replicas)
        assert (
            config.custom["flashrl"]["precision"] == "int8" and config.custom["flashrl"]["bf16_replica_fraction"] == 0.5
        )
