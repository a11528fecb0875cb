# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of another number of ranks is refused before verl loads anything."""

import json

import pytest
from omegaconf import OmegaConf

from flashrl_verl.errors import FlashRLError
from flashrl_verl.trainer.trainer import FlashRLTrainer, require_same_ranks


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
@pytest.mark.parametrize("part", ["actor", "critic"])
def test_actor_and_critic_are_looked_at_before_verl_loads_either(tmp_path, mode, part):
    from verl.single_controller.base.worker_group import WorkerGroup

    step = tmp_path / "global_step_3"
    for name, ranks in (("actor", 0), ("critic", 0), (part, 4)):
        (step / name).mkdir(parents=True, exist_ok=True)
        (step / name / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    trainer = FlashRLTrainer.__new__(
        FlashRLTrainer
    )  # its worker groups have no rank: that verl asked them is another error
    resume = {"resume_mode": mode, "resume_from_path": str(step), "default_local_dir": str(tmp_path)}
    trainer.config, trainer.use_critic = OmegaConf.create({"trainer": resume}), True
    trainer.actor_rollout_wg = trainer.critic_wg = WorkerGroup(resource_pool=None)
    with pytest.raises(FlashRLError) as caught:
        trainer._load_checkpoint()
    message = str(caught.value)
    assert message.startswith(f"{step}/{part} was saved by 4 ranks and this run has 0. Remedy: the same trainer.nnodes")
    assert f"verl.model_merger merge --backend fsdp --local_dir {step}/actor" in message
    assert "actor_rollout_ref.model.path=<model> and trainer.resume_mode=disable" in message and "\n" not in message


@pytest.mark.parametrize("record", [None, "", "[]", '{"world_size": 4}'])
def test_the_same_number_and_a_folder_without_verls_record_are_left_to_verl(tmp_path, record):
    (tmp_path / "actor").mkdir()
    if record is not None:
        (tmp_path / "actor" / "fsdp_config.json").write_text(record)
    require_same_ranks(tmp_path, "actor", 4)
