# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of another number of ranks is refused before verl loads anything; others are left to verl."""

import pytest
from guard_steps import guard_of
from omegaconf import OmegaConf

from flashrl_verl.errors import FlashRLError
from flashrl_verl.trainer.trainer import FlashRLTrainer


class Ranks:
    """A worker group of two, which says what verl has it load."""

    world_size = 2

    def load_checkpoint(self, local_path: str, **more) -> None:
        raise InterruptedError(local_path)


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
@pytest.mark.parametrize("record", [None, "", "[]", '{"world_size": 2}', '{"world_size": 4}'])
def test_another_number_of_ranks_is_refused_and_the_rest_is_verls_to_load(tmp_path, record, mode):
    step = tmp_path / "global_step_3"
    (step / "actor").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    if record is not None:
        (step / "actor" / "fsdp_config.json").write_text(record)
    resume = {"resume_mode": mode, "resume_from_path": str(step), "default_local_dir": str(tmp_path)}
    trainer = object.__new__(FlashRLTrainer)
    trainer.config = OmegaConf.create({"trainer": resume | {"del_local_ckpt_after_load": False}})
    trainer.use_critic, trainer.guard = False, guard_of(action="stop")
    trainer.actor_rollout_wg = Ranks()
    if "4" in (record or ""):
        said = f"^{step}/actor was saved by 4 ranks and this run has 2. Remedy: .* --local_dir {step}/actor"
        with pytest.raises(FlashRLError, match=said):
            trainer._load_checkpoint()
    else:
        with pytest.raises(InterruptedError, match=f"{step}/actor"):
            trainer._load_checkpoint()
        assert trainer.guard.last_checkpoint == step, "what a stop names before the first save"
