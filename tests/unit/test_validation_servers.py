# SPDX-License-Identifier: Apache-2.0
"""Hardware, ranks and servers: what cannot run there is refused before anything is started."""

import json
import os
import subprocess
import sys

import pytest
from refusals import ACTOR, ENGINE, ENV, ROLLOUT, ROOT, assert_refused, changed, names, refusal

from flashrl_verl.errors import ConfigError
from flashrl_verl.validation import validate_config

REFUSED = [
    # monitors that have no key
    ({f"{ROLLOUT}.prometheus.enable": True}, "prometheus.enable=true", f"{ROLLOUT}.prometheus.enable=false"),
    ({"trainer.logger": ["console", "rl_insight"]}, '["console", "rl_insight"]', "trainer.logger without rl_insight"),
    ({"trainer.logger": "rl_insight"}, "trainer.logger=rl_insight", "trainer.logger without rl_insight"),
    # verl's uvicorn gets no certificate
    ({f"{ENGINE}.ssl_certfile": "a.pem"}, f"{ENGINE}.ssl_certfile=a.pem", f"remove {ENGINE}.ssl_certfile"),
    ({f"{ENGINE}.enable-ssl-refresh": True}, "enable-ssl-refresh=true", "flashrl.server_address=loopback"),
    # hardware chosen by half
    ({"trainer.device": "cpu"}, "trainer.device=cpu", "hardware=cpu"),
    ({"trainer.device": "npu"}, "trainer.device=npu", "hardware=cuda or hardware=cpu"),
    ({f"{ENV}.VERL_PLATFORM": "cpu"}, f"{ENV}.VERL_PLATFORM=cpu", "VERL_PLATFORM=cpu in the environment of the command"),
    # no workers at all
    *(
        ({key: value}, f"{key}={json.dumps(value)}", f"{key}=1 or more")
        for key in ("trainer.nnodes", "trainer.n_gpus_per_node")
        for value in (0, -1, 0.5, True, None)
    ),
]


@pytest.mark.parametrize(("settings", "value", "remedy"), REFUSED, ids=names(REFUSED))
def test_what_the_hardware_or_the_servers_cannot_do_is_refused_with_value_reason_and_remedy(settings, value, remedy):
    assert_refused(settings, value, remedy)


@pytest.mark.parametrize(
    ("settings", "value", "remedy"),
    [
        ({f"{ACTOR}.strategy": "fsdp"}, f"{ACTOR}.strategy=fsdp", f"{ACTOR}.strategy=fsdp2"),
        ({f"{ROLLOUT}.enable_sleep_mode": True}, "sleep_mode=true", f"{ROLLOUT}.enable_sleep_mode=false"),
        ({f"{ENV}.VERL_PLATFORM": None}, "trainer.device=cpu", "hardware=cpu"),
        ({"trainer.device": "cuda"}, f"{ENV}.VERL_PLATFORM=cpu", "hardware=cpu"),
    ],
)
def test_half_of_the_cpu_platform_is_refused(settings, value, remedy):
    message = refusal(changed(settings, hardware="cpu"))
    assert value in message and remedy in message.partition(" Remedy: ")[2]


@pytest.mark.slow
def test_verls_own_entry_point_without_the_variable_is_told_to_set_it(tmp_path):
    """verl writes the platform it found into trainer.device before our trainer sees the configuration; the remedy works."""
    code = (
        "import flashrl_verl.plugin_verl\n"
        "from hydra import compose, initialize_config_dir\n"
        "from flashrl_verl.validation import validate_config\n"
        "from verl.utils.device import auto_set_device\n"
        f"with initialize_config_dir({str(ROOT / 'recipe' / 'flashrl' / 'config')!r}, version_base=None):\n"
        "    cfg = compose('flashrl_trainer', overrides=['experiment=quickstart'])\n"
        "auto_set_device(cfg)\n"
        "validate_config(cfg)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "VERL_PLATFORM"} | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", code]
    told = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert told.returncode != 0 and "Remedy: VERL_PLATFORM=cpu in the environment of the command" in told.stderr
    followed = subprocess.run(run, cwd=tmp_path, env=environment | {"VERL_PLATFORM": "cpu"}, capture_output=True, text=True)
    assert followed.returncode == 0, followed.stderr


FRACTION = "flashrl.bf16_replica_fraction"


@pytest.mark.parametrize(
    ("settings", "reason", "remedy"),
    [
        ({"trainer.n_gpus_per_node": 1, FRACTION: 0.5}, "number of replicas is 1", f"{FRACTION}=0.0"),
        (
            {"trainer.n_gpus_per_node": 8, f"{ROLLOUT}.tensor_model_parallel_size": 8, FRACTION: 0.5},
            "number of replicas is 1",
            f"a smaller {ROLLOUT}.tensor_model_parallel_size",
        ),
        ({"trainer.n_gpus_per_node": 4, FRACTION: 0.1}, "of 4 replicas", "from 0.25 to 0.75"),
        ({"trainer.n_gpus_per_node": 2, "trainer.nnodes": 2, FRACTION: 0.9}, "that would be 4 in BF16", "from 0.25 to 0.75"),
    ],
)
def test_a_mixture_that_the_replicas_do_not_make_is_refused(settings, reason, remedy):
    tensor_parallel = {f"{ROLLOUT}.tensor_model_parallel_size": 1}
    stated, _, suggested = refusal(changed({"trainer.nnodes": 1, **tensor_parallel, **settings})).partition(" Remedy: ")
    assert f"{FRACTION}={settings[FRACTION]}" in stated and reason in stated and remedy in suggested
    for key in ("trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.tensor_model_parallel_size"):
        assert key in stated


def test_a_mixture_of_replicas_is_accepted():
    ranks = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8, f"{ROLLOUT}.tensor_model_parallel_size": 4}
    assert validate_config(changed({**ranks, FRACTION: 0.25})).bf16_replica_fraction == 0.25


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"trainer.n_gpus_per_node": 2}, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256"),
        (
            {"trainer.n_gpus_per_node": 2, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 128},
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=256",
        ),
    ],
)
def test_micro_batches_that_do_not_divide_a_ranks_share_are_refused_before_anything_is_loaded(changes, key):
    from flashrl_verl.quickstart import compose

    words = [f"{name}={value}" for name, value in changes.items()]
    with pytest.raises(ConfigError, match=f"{key} is refused: .*=32 prompts x 8 samples on 2 ranks are 128 sequences a rank"):
        validate_config(compose(["experiment=quickstart", *words]))
    fits = [f"actor_rollout_ref.{name}_micro_batch_size_per_gpu=64" for name in ("actor.ppo", "rollout.log_prob")]
    validate_config(compose(["experiment=quickstart", *words[:1], *fits]))
