# SPDX-License-Identifier: Apache-2.0
"""What goes wrong ends the run with one error that names it, soon, and loses nothing."""

import http.client
import os
import re
import signal
import time

import psutil
import pytest
from recipe_runs import PROGRAMS, TWO_RANKS, command, finish, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NO_FILTER = "algorithm.filter_groups.enable=false"
WORKER_PROCESS = "+actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=mp"
"""An engine as on a GPU."""


def assert_says(pattern: str, output: str) -> None:
    assert re.search(pattern, output), f"no {pattern!r} in the output, which ends:\n{output[-3000:]}"


def steps_trained(run) -> list[int]:
    return [step for step in run.metrics() if step > 0]


@pytest.mark.parametrize(
    "fault, message, overrides",
    [
        ("skip_update:2", r"step 1, but the trainer is at step 2", []),
        (
            "stale_tensor_on_rank_1:2",
            r"replica 0, rank 1: at step 2 .* 1 of 27 tensors: model.layers.0.mlp.down_proj.weight",
            TWO_RANKS,
        ),
    ],
)
def test_a_dropped_update_or_tensor_is_noticed_at_a_learning_rate_of_1e_6(recipe, fault, message, overrides):
    rate = "actor_rollout_ref.actor.optim.lr=1e-6"
    run = recipe(NO_FILTER, *overrides, rate, "trainer.total_training_steps=3", fault=fault)
    assert run.returncode != 0
    assert_says(message, run.output)
    assert steps_trained(run) == [1]


ENGINE_ENDED = "weight update of step 2: the rollout engine ended"


@pytest.mark.parametrize(
    "fault, message, overrides",
    [
        (
            "raise_in_receiver:2",
            r"replica 0: worker 0: RefitError: .*step 2: a bucket cannot be loaded: OSError: a fault",
            [WORKER_PROCESS],
        ),
        ("kill_engine:2", ENGINE_ENDED, [WORKER_PROCESS]),
        ("kill_engine:2", ENGINE_ENDED, [WORKER_PROCESS, *TWO_RANKS]),  # the second rank waits for its worker
        ("kill_engine:2", ENGINE_ENDED, ["trainer.v1.trainer_mode=flashrl_colocate_async"]),
    ],
)
def test_a_failing_receiver_ends_the_run_long_before_the_time_limit(recipe, tmp_path, fault, message, overrides):
    words = ("trainer.total_training_steps=3", "flashrl.update_timeout_s=400", *overrides)
    run = recipe(NO_FILTER, *words, fault=fault)
    assert run.returncode != 0
    assert_says(message, run.output)
    assert time.time() - (tmp_path / "fired").stat().st_mtime < 60, "seconds from the fault to the end of the process"


def test_an_engine_that_keeps_something_of_its_old_weights_is_stopped_before_the_first_step(recipe, tmp_path):
    """The storage is right, what was derived from it is not. This is what the check for copies
    made; a copy from the start is in test_self_check.py."""
    run = recipe(NO_FILTER, fault="stale_kernel:5")
    assert run.returncode != 0
    assert (tmp_path / "fired").exists()
    assert_says(
        r"self-check failed: after poisoned weights and the same weights again.*(greedy tokens|log-probs)", run.output
    )
    assert not (tmp_path / "metrics.jsonl").exists() or steps_trained(run) == []


def test_the_guard_stops_a_run_with_its_patience_and_names_the_last_checkpoint_of_a_healthy_step(recipe, tmp_path):
    words = ("flashrl.guard.action=stop", "flashrl.guard.patience=2", "trainer.save_freq=1")
    run = recipe(NO_FILTER, *words, "trainer.total_training_steps=6", fault="mismatch:2")
    assert run.returncode != 0
    stop = (
        r"GuardError: step 3: .*rollout_corr/k3_kl=1 is beyond flashrl\.guard\.k3_kl_max=0\.02 for 2 steps.*"
        r"Resume from \S+/global_step_1, or go on regardless"  # step 2 was beyond the limit already
    )
    assert_says(stop, run.output)
    events = {step: values["flashrl/guard_events"] for step, values in run.metrics().items() if step}
    assert events == {1: 0, 2: 0, 3: 1}, "the step that is stopped is logged"
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*"))
    assert saved == ["global_step_1", "global_step_2"]


@pytest.mark.parametrize("mode", ["flashrl", "flashrl_colocate_async"])
def test_a_run_without_a_reward_says_so_and_ends_with_an_error(recipe, mode):
    words = ["reward.custom_reward_function.name=constant", "flashrl.max_num_gen_batches=3"]
    words += ["trainer.v1.colocate_async.num_warmup_batches=4"]  # no refills: they do not count
    run = recipe(*words, f"trainer.v1.trainer_mode={mode}")
    assert run.returncode != 0
    assert_says(r"none of 8 responses has had a reward \(constant of .*Its response ends: '", run.output)
    assert len(re.findall("responses has had a reward", run.output)) == 1
    assert_says(
        r"DynamicSamplingError: step 1: .*more than 3 x 4 prompts.*no response had a reward"
        r".*max_num_gen_batches",
        run.output,
    )


FAILING = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    "actor_rollout_ref.rollout.multi_turn.enable=true",
    "actor_rollout_ref.rollout.multi_turn.format=failing",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={PROGRAMS}/toy_tool.py",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",  # the toy's likeliest token ends no answer
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "trainer.test_freq=1",
)
"""One answer in five that ends before its limit ends with an error."""


@pytest.mark.parametrize("mode", ["flashrl", "flashrl_colocate_async"])
def test_responses_that_fail_end_the_run(recipe, mode):
    """Where verl trains on padding in their place, and where it draws others."""
    run = recipe(*FAILING, f"trainer.v1.trainer_mode={mode}")
    assert run.returncode != 0
    assert_says(
        r"ResponseError: \d+ of \d+ responses ended with an error, more than \S+_responses_max=0.01", run.output
    )


def test_responses_that_may_fail_are_counted(recipe):
    run = recipe(*FAILING, NO_FILTER, "flashrl.failed_responses_max=0.4")
    assert run.returncode == 0, run.failure
    shares = [values["flashrl/failed_responses"] for step, values in run.metrics().items() if step]
    assert len(shares) == 2 and sum(shares) > 0 and max(shares) < 0.4


def test_a_reward_that_no_function_returned_and_that_is_no_number_ends_the_run(assets, tmp_path):
    (tmp_path / "loops.yaml").write_text("- {name: own, _target_: nan_agent_loop.RewardsItself}")
    loop = "actor_rollout_ref.rollout.agent"
    words = f"{loop}.default_agent_loop=own", f"{loop}.agent_loop_config_path={tmp_path}/loops.yaml"
    words += NO_FILTER, "trainer.val_before_train=false"
    path = ":".join([str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = finish(start(command(assets, tmp_path, *words), tmp_path, variables={"PYTHONPATH": path}), tmp_path)
    assert run.returncode != 0
    assert_says("ResponseError: step 1: a reward is not a finite number, and came from no reward function", run.output)


def test_a_reward_worker_that_cannot_be_made_ends_the_run_with_its_own_error(recipe):
    run = recipe("reward.reward_kwargs.max_resp_len=null")
    assert run.returncode != 0 and (not run.metrics_file.exists() or not run.metrics_file.read_text())
    assert_says(r"WorkerLostError: .*RewardLoopWorker.*max_resp_len", run.output)


def test_a_killed_agent_loop_ends_the_run_that_waits_for_its_responses(assets, tmp_path):
    words = "reward.custom_reward_function.name=slow", "trainer.val_before_train=false"
    process = start(command(assets, tmp_path, NO_FILTER, *words), tmp_path)
    metrics_file = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics_file.exists() and metrics_file.read_text().count("\n")):  # step 1
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.2)
    time.sleep(5.0)  # into the next generation
    # A run's own server, while it lasts: every route answers 403 (tests/unit/test_access.py asks all of them).
    server = http.client.HTTPConnection(
        re.search(r"LLMServerManager: \['([\d.:]+)'", (tmp_path / "log").read_text())[1]
    )
    server.request("GET", "/health")
    status = server.getresponse().status
    workers = psutil.Process(process.pid).children(recursive=True)
    next(one for one in workers if "AgentLoopWorker" in " ".join(one.cmdline())).kill()
    killed = time.monotonic()
    run = finish(process, tmp_path, timeout=120)
    assert status == 403
    assert run.returncode != 0 and time.monotonic() - killed < 60
    assert_says(r"WorkerLostError: Actor\(AgentLoopWorkerTQ.* has ended: .*set trainer.save_freq", run.output)


@pytest.mark.parametrize("mode", ["flashrl", "flashrl_colocate_async"])
def test_a_killed_run_resumes_with_equal_weights_and_its_history(assets, tmp_path, mode):
    saves = "trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.resume_mode=auto"
    words = command(assets, tmp_path, NO_FILTER, f"trainer.v1.trainer_mode={mode}", *saves)
    first = start(words, tmp_path)
    metrics_file = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics_file.exists() and metrics_file.read_text().count("\n") >= 4):  # steps 0 to 3
        assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    time.sleep(5)  # Ray's processes notice
    before = finish(first, tmp_path).metrics()
    latest = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert latest in (2, 4)
    os.rename(tmp_path / "log", tmp_path / "log-first")
    run = finish(start(words, tmp_path), tmp_path)
    assert run.returncode == 0, run.failure
    metrics = run.metrics()
    assert sorted(metrics) == list(range(7))
    assert metrics[1] == before[1] and metrics[2]["actor/loss"] == before[2]["actor/loss"]
    # The resumed run's first refit sends the checkpoint's weights: same step, same checksums as before the kill.
    assert_says(
        rf"rollout precision int8: 8 quantized layers .*receipt of step {latest} verified "
        rf"\(sum {before[latest]['flashrl/receipt_sum']}\)",
        run.output,
    )


def test_two_runs_on_one_machine_do_not_take_each_others_weights(assets, tmp_path):
    """Both drivers start a Ray cluster of their own, in which the job id is the same."""
    folders = [tmp_path / "a", tmp_path / "b"]
    processes = []
    for folder, rate in zip(folders, ("1e-3", "1e-5"), strict=True):
        folder.mkdir()
        words = command(assets, folder, NO_FILTER, f"actor_rollout_ref.actor.optim.lr={rate}")
        processes.append(start(words, folder))
    runs = [finish(process, folder, timeout=900) for process, folder in zip(processes, folders, strict=True)]
    assert [run.returncode for run in runs] == [0, 0], "".join(run.failure for run in runs)
    sums = [run.metrics()[2]["flashrl/receipt_sum"] for run in runs]
    assert sums[0] != sums[1], "the two trainers hold different weights"
