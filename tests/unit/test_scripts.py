# SPDX-License-Identifier: Apache-2.0
"""The scripts a user runs: words, help, an installation that is watched, stopped, and gone on with."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SETUP_ENV = ROOT / "scripts" / "setup_env.sh"


def run_setup(*words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **variables}
    return subprocess.run(["bash", SETUP_ENV, *words], env=environment, capture_output=True, text=True, timeout=400)


def test_setup_refuses_a_python_it_does_not_support(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3.9.2\n")
    old.chmod(0o755)
    process = run_setup(FLASHRL_VENV=str(tmp_path / "venv"), FLASHRL_DEVICE="cpu", FLASHRL_PYTHON=str(old))
    assert process.returncode == 1
    assert "3.11 or 3.12" in process.stderr and "FLASHRL_PYTHON" in process.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_does_not_clear_a_folder_that_it_did_not_make(tmp_path):
    (tmp_path / "precious").write_text("kept")
    process = run_setup(FLASHRL_VENV=str(tmp_path), FLASHRL_DEVICE="cpu", FLASHRL_PYTHON=sys.executable)
    assert process.returncode == 1 and "was not made by this script" in process.stderr
    assert (tmp_path / "precious").read_text() == "kept"


def test_setup_refuses_an_unknown_device(tmp_path):
    process = run_setup(FLASHRL_VENV=str(tmp_path / "venv"), FLASHRL_DEVICE="tpu")
    assert process.returncode == 1 and "'tpu'" in process.stderr


# ---- set-up with a Python that installs nothing ----

# It answers the questions about its version, makes an environment that holds itself, and runs a file of the test for
# pip.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-c import platform"*) echo 3.11.9 ;;
  "-m venv "*) mkdir -p "${{!#}}/bin" "${{!#}}/lib/python3.11/site-packages" && cp "$0" "${{!#}}/bin/python" ;;
  "-m pip "*) echo "$*" >>{folder}/asked && source {folder}/pip ;;
  *) cat >/dev/null ;;
esac
"""


@pytest.fixture
def fake(tmp_path):
    """The variables for a set-up in tmp_path/venv; what stands in the file `pip` happens whenever pip is called."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(folder=tmp_path))
    python.chmod(0o755)
    (tmp_path / "pip").write_text("")
    variables = {"FLASHRL_PYTHON": str(python), "FLASHRL_VENV": str(tmp_path / "venv"), "FLASHRL_DEVICE": "cpu"}
    return variables | {"FLASHRL_HEARTBEAT_S": "1"}


def asked(folder: Path) -> list[str]:
    """What pip was called for."""
    return (folder / "asked").read_text().splitlines()


def test_setup_says_where_pips_output_goes_and_that_it_is_still_at_it(tmp_path, fake):
    (tmp_path / "pip").write_text("echo Collecting patience; sleep 1.5\n")
    process = run_setup(**fake)
    assert process.returncode == 0, process.stderr
    log = tmp_path / "venv" / "setup.log"
    assert f"pip's output: {log}" in process.stdout and "pinned packages" in process.stdout
    assert re.search(r"\.\.\. for \d+ s; 0 packages installed; pip: Collecting patience\n", process.stdout)
    assert process.stdout.splitlines()[-1].endswith(f"ready: {tmp_path}/venv") and process.stderr == ""
    assert log.read_text().count("Collecting patience") == len(asked(tmp_path)) == 3  # torch, the rest, this package


def test_a_setup_that_is_whole_is_used_again(tmp_path, fake):
    run_setup(**fake)
    calls = len(asked(tmp_path))
    process = run_setup(**fake)
    assert process.returncode == 0 and "ready" in process.stdout and len(asked(tmp_path)) == calls


def test_a_setup_that_failed_says_so_and_goes_on_with_what_is_installed(tmp_path, fake):
    (tmp_path / "pip").write_text('case "$*" in *" -r "*) echo no space left; exit 1 ;; esac\n')
    process = run_setup(**fake)
    assert process.returncode == 1 and "no space left" in process.stderr
    assert "The same command again goes on: installed packages are kept" in process.stderr.splitlines()[-1]
    installed = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "torch.py"
    installed.write_text("large")
    (tmp_path / "pip").write_text("")
    again = run_setup(**fake)
    assert again.returncode == 0 and f"going on with {tmp_path}/venv" in again.stdout
    assert installed.read_text() == "large"


def test_a_setup_that_failed_for_another_environment_starts_from_nothing(tmp_path, fake):
    (tmp_path / "pip").write_text("exit 1\n")
    assert run_setup(**fake).returncode == 1
    (tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "torch.py").write_text("of another version")
    (tmp_path / "pip").write_text("")
    process = run_setup(**fake, FLASHRL_VLLM_WHEEL="vllm-1+cpu.whl")
    assert process.returncode == 0 and "new environment" in process.stdout
    assert not list((tmp_path / "venv").rglob("torch.py"))


def test_a_stop_while_the_folder_is_made_does_not_make_it_a_strangers(tmp_path, fake):
    python = Path(fake["FLASHRL_PYTHON"])
    whole = python.read_text()
    python.write_text(whole.replace('"-m venv "*)', '"-m venv "*) mkdir -p "${!#}/bin"; exit 1 ;; "-m never"*)'))
    assert "venv failed" in run_setup(**fake).stderr
    python.write_text(whole)
    process = run_setup(**fake)
    assert process.returncode == 0 and "new environment" in process.stdout


@pytest.mark.parametrize(
    ("sent", "pip"),
    [
        (signal.SIGINT, "sleep 60"),
        (signal.SIGTERM, "sleep 60"),
        (signal.SIGTERM, "trap '' INT; sleep 60"),  # does not listen at first
    ],
)
def test_a_signal_ends_setup_and_pip_with_its_children(tmp_path, fake, sent, pip):
    (tmp_path / "pip").write_text(f"echo $$ >{tmp_path}/pid.new && mv {tmp_path}/pid.new {tmp_path}/pid; {pip}\n")
    process = subprocess.Popen(
        ["bash", SETUP_ENV],
        env={**os.environ, **fake},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As on a terminal: a test run in the background ignores Ctrl-C, and what it starts would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 200
    pids = []
    while len(pids) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        if (tmp_path / "pid").exists():
            pip_process = psutil.Process(int((tmp_path / "pid").read_text()))
            pids = [pip_process.pid, *(child.pid for child in pip_process.children() if child.name() == "sleep")]
    process.send_signal(sent)  # to the script alone
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + sent and said == "stopped by a signal; the same command again goes on\n"
    assert len(pids) == 2 and not [pid for pid in pids if _runs(pid)]
    (tmp_path / "pip").write_text("")
    assert "going on with" in run_setup(**fake).stdout


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("status", [0, 7])
def test_a_watched_command_keeps_its_status_under_set_e(status):
    script = f"""set -euo pipefail; source {ROOT}/scripts/lib.sh; tell() {{ echo "after $1 s"; }}
        watched 1 tell bash -c 'sleep 1.5; exit {status}' && echo good || echo "status $?"; watched 1 tell true; echo end"""  # noqa: E501
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=400)
    said = process.stdout.splitlines()
    assert re.fullmatch(r"after \d+ s", said[0])
    assert [line for line in said if not line.startswith("after")] == [
        "good" if status == 0 else f"status {status}",
        "end",
    ]
    assert process.stderr == ""


# ---- words of the scripts ----


def test_setup_refuses_a_word_before_it_makes_anything(tmp_path):
    process = run_setup("--devise=cpu", FLASHRL_VENV=str(tmp_path / "venv"))
    assert process.returncode == 1 and "'--devise=cpu'" in process.stderr and not (tmp_path / "venv").exists()


@pytest.mark.parametrize("word", ["--help", "-h"])
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("setup_env.sh", "FLASHRL_DEVICE"),
        ("test.sh", "--slow"),
    ],
)
def test_a_script_explains_itself_and_makes_nothing(tmp_path, script, says, word):
    environment = {**os.environ, "FLASHRL_VENV": str(tmp_path / "venv")}
    command = ["bash", ROOT / "scripts" / script, word]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0 and says in process.stdout and "set -euo" not in process.stdout
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seeed", "3"], "'--seeed'"),
        (["--seed=3", "precision"], "'precision'"),
        (["flashrl.precision=bf16", "--resum"], "'--resum'"),
        (["--output"], "--output needs a value"),
    ],
)
def test_a_mistyped_word_is_refused_before_the_environment_is_made(tmp_path, words, named):
    process = run_quickstart(*words, cwd=tmp_path, FLASHRL_VENV=str(tmp_path / "venv"))
    assert process.returncode == 1 and named in process.stderr and "--seed N" in process.stderr
    assert not (tmp_path / "venv").exists()


def test_every_word_that_the_quickstart_knows_gets_past_the_script(tmp_path, fake):
    words = ["--seed", "3", "--output=here", "--resume", "+a.b=1", "~c", "--output", "there", "--seed=1"]
    process = run_quickstart(*words, cwd=tmp_path, **fake)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1].endswith(f"ready: {tmp_path}/venv")


def run_quickstart(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **variables}
    environment["PATH"] = os.pathsep.join([os.path.dirname(os.path.abspath(sys.executable)), environment["PATH"]])
    command = ["bash", ROOT / "scripts" / "quickstart.sh", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_quickstart_explains_itself_without_an_environment(tmp_path, word):
    process = run_quickstart(word, cwd=tmp_path, FLASHRL_VENV=str(tmp_path / "venv"))
    assert process.returncode == 0 and "--resume" in process.stdout and "set -euo" not in process.stdout
    assert not (tmp_path / "venv").exists()


def test_a_relative_output_of_the_quickstart_starts_where_the_caller_is(tmp_path):
    (tmp_path / "taken").write_text("mine")
    process = run_quickstart("--output", "taken", cwd=tmp_path, FLASHRL_SKIP_SETUP="1")
    assert process.returncode == 1 and process.stderr.startswith(f"ConfigError: --output {tmp_path}/taken: ")


@pytest.mark.parametrize(
    "script",
    [
        "scripts/setup_env.sh",
        "scripts/test.sh",
        "scripts/quickstart.sh",
        ".ci/run",
    ],
)
def test_scripts_are_executable_bash(script):
    path = ROOT / script
    assert os.access(path, os.X_OK) and path.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", path], check=True)
