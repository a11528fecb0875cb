# SPDX-License-Identifier: Apache-2.0
"""Of a failed run's log the lines are shown that say why."""

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.log_excerpt import last_error, last_line

RAY_LOG = """\
(TaskRunner pid=4242) INFO 11-20 starting
Traceback (most recent call last):
  File "/x/main_flashrl.py", line 1, in <module>
ValueError: an unrelated one that was handled
\x1b[36m(Server pid=4243)\x1b[0m (Worker pid=7) ERROR 11-20 15:48:14 [core.py:9] flashrl_verl.errors.RefitError: 2 tensors
\x1b[36m(Server pid=4243, ip=10.0.0.1)\x1b[0m   model.layers.0.mlp.down_proj.weight
(WorkerDict pid=4243) Traceback (most recent call last):
ray.exceptions.RayTaskError(RuntimeError): ray::TaskRunner.run() (pid=4242, ip=10.0.0.1)
RuntimeError: the worker died

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""  # noqa: E501


def test_of_a_failed_run_our_own_error_is_shown_before_its_consequences():
    assert last_error(RAY_LOG) == [
        "flashrl_verl.errors.RefitError: 2 tensors",
        "  model.layers.0.mlp.down_proj.weight",
    ]


def test_every_error_of_ours_is_known_for_a_cause():
    for error in (FlashRLError, *FlashRLError.__subclasses__()):
        assert last_error(f"{error.__module__}.{error.__name__}: why\nRayError: it\nOSError: pipe")[0].endswith(": why")


def test_of_a_failed_engine_its_own_error_is_shown_before_those_that_point_to_it():
    log = """(FlashRLHttpServer pid=77) (EngineCore_DP0 pid=88) ERROR 11-21 11:37:23 [core.py:9] AssertionError: in profiling
(FlashRLHttpServer pid=77) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
ray.exceptions.RayTaskError(RuntimeError): ray::TaskRunnerV1.run() (pid=70)"""  # noqa: E501
    assert last_error(log) == ["AssertionError: in profiling"]
    assert last_error(log.split("\n", 1)[1])[0].startswith("RuntimeError: Engine core initialization failed")


def test_of_a_log_that_is_being_written_the_last_whole_line_is_shown_as_it_is(tmp_path):
    log = tmp_path / "log"
    log.touch()
    assert last_line(log) == ""
    log.write_text("x" * 5000 + "\n\x1b[36m(TaskRunner pid=4242)\x1b[0m [bold] 8 of 16\n \n(TaskRunner pid=4242) 9 o")
    assert last_line(log) == "\\[bold] 8 of 16"
