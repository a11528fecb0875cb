# SPDX-License-Identifier: Apache-2.0
"""`flashrl check` as a whole: a check that goes wrong is a failure with a remedy, children end in time, calls are
checked."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import time

import planted
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flashrl_verl.cli import app
from flashrl_verl.errors import FlashRLError
from flashrl_verl.settings import Precision
from flashrl_verl.tools.check import command, node, subjects
from flashrl_verl.tools.check.child import run_child
from flashrl_verl.tools.check.findings import Finding, Verdict, counts, exit_code, fail, guarded, ok, skipped, warn
from flashrl_verl.tools.check.settings import CheckSettings


@pytest.mark.parametrize("verdict", ["warn", "fail"])
def test_what_is_wrong_has_a_remedy(verdict):
    with pytest.raises(ValueError, match="without a remedy"):
        Finding(name="disk", verdict=verdict, text="full")


def test_only_a_failure_makes_the_exit_code_1():
    fine = [ok("a", "well"), warn("b", "odd", "look"), skipped("c", "no GPU")]
    assert exit_code(fine) == 0 and exit_code([*fine, fail("d", "bad", "mend")]) == 1
    assert counts(fine) == {"ok": 1, "warn": 1, "fail": 0, "not checked": 1}, "what nobody looked at is not ok"


def test_a_check_that_raises_is_a_failure_and_what_it_had_found_stays():
    def check():
        yield ok("first", "well")
        raise OSError("the disk\nis on fire")

    first, second = guarded("second", check)
    assert first.verdict is Verdict.OK
    assert (second.name, second.verdict) == ("second", Verdict.FAIL)
    assert "OSError: the disk is on fire" in second.text and second.remedy


# ---- children ----


def child(tmp_path, text: str, **more):
    """The child that imports verl, with a verl of this text before the real one on its path."""
    folder = planted.module(tmp_path / "path", "verl", text)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return run_child("verl_process", subjects.of_verl_process(), CheckSettings(), environment=environment, **more)


@pytest.mark.slow
def test_a_child_that_hangs_is_stopped_with_all_that_it_started(tmp_path):
    started = time.monotonic()
    mark = tmp_path / "alive"
    text = (
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', "
        f"\"import time; time.sleep(12); open('{mark}', 'w')\"])\ntime.sleep(600)"
    )
    report = child(tmp_path, text, limit_s=6)
    assert time.monotonic() - started < 60
    first, second = report.findings
    assert first.verdict is Verdict.FAIL and "did not end within 6 s" in first.text and "--timeout" in first.remedy
    assert second.verdict is Verdict.SKIPPED
    time.sleep(10)
    assert not mark.exists(), "its own child is stopped too"


def test_a_child_that_is_killed_is_a_failure_with_the_signal(tmp_path):
    report = child(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert [f.verdict for f in report.findings] == [Verdict.FAIL, Verdict.SKIPPED]
    assert "SIGSEGV" in report.findings[0].text


def test_a_child_that_leaves_is_a_failure_with_its_last_words(tmp_path):
    report = child(tmp_path, "import sys; sys.exit('RuntimeError: no licence')")
    assert report.findings[0].verdict is Verdict.FAIL
    assert "exit code 1" in report.findings[0].text and "no licence" in report.findings[0].text


def test_an_import_that_fails_is_a_failure_with_the_error_and_the_rest_is_not_ok(tmp_path):
    report = child(tmp_path, "raise ImportError('libcudart.so.13: cannot open shared object file')")
    assert {f.name: f.verdict for f in report.findings} == {
        "verl process": Verdict.FAIL,
        "verl plugin": Verdict.SKIPPED,
        "imported versions": Verdict.SKIPPED,
    }
    assert "ImportError: libcudart.so.13" in report.findings[0].text


def test_an_answer_that_is_cut_off_in_a_line_keeps_the_lines_before(tmp_path):
    """As a full disk leaves it: what was said stays, what is missing is not ok."""
    line = '{"name": "verl plugin", "verdict": "ok", "text": "loaded"}\\n'
    report = child(tmp_path, f"import os, sys; open(sys.argv[2], 'a').write('{line}' + '{line[:20]}'); os._exit(1)")
    assert [(f.name, f.verdict) for f in report.findings] == [
        ("verl plugin", Verdict.OK),
        ("imported versions", Verdict.FAIL),
    ]
    assert "exit code 1" in report.findings[1].text


def test_without_a_temporary_folder_the_children_are_failures_and_the_rest_of_the_report_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    report = node.check_node(CheckSettings())
    found = {finding.name: finding for finding in report.findings}
    assert found["verl plugin"].verdict is Verdict.FAIL and found["imported versions"].verdict is Verdict.SKIPPED
    assert found["vLLM plugin"].verdict is Verdict.FAIL and found["int8 numerics"].verdict is Verdict.SKIPPED
    assert "FileNotFoundError" in found["verl plugin"].text and "TMPDIR" in found["verl plugin"].remedy
    assert {"Python", "disk", "loopback"} <= set(found), "what needs no child was looked at"


def test_a_node_without_a_gpu_for_ray_is_not_asked_for_what_ranks_need():
    """A head in the CUDA environment without a driver is no failure."""
    settings = CheckSettings(precisions=("int8",))
    report = run_child("vllm_process", subjects.of_vllm_process(settings), settings, ranks=False)
    verdicts = {finding.name: finding.verdict for finding in report.findings}
    assert verdicts.pop("vLLM plugin") is Verdict.OK
    assert set(verdicts) == {
        "driver",
        "device",
        "row kernel",
        "int8 kernel",
        "int8 numerics",
        "int8 experts",
        "INT8 attention",
    }
    assert set(verdicts.values()) == {Verdict.SKIPPED} and report.facts == {"GPUs": "none"}


def test_a_child_does_not_see_the_working_directory(tmp_path, monkeypatch):
    """Ray's workers do not either: a package that is found only from there is missing in a run."""
    planted.module(tmp_path, "sitecustomize_of_mine", "")
    monkeypatch.chdir(tmp_path)
    report = child(tmp_path, "import sitecustomize_of_mine")
    assert "No module named 'sitecustomize_of_mine'" in report.findings[0].text


# ---- the command ----


def test_settings_survive_the_way_to_a_child():
    settings = CheckSettings(precisions=("fp8",), bucket_megabytes=64, ship_code=False)
    again = CheckSettings(**json.loads(json.dumps(settings.to_dict())))
    assert again == settings and again.precisions == (Precision.FP8,)


@pytest.mark.parametrize(
    "words",
    [
        ["--precision", "int4"],
        ["--precision", ","],
        ["--no-such-option"],
        ["--json", "/no/such/folder/check.json"],
        ["--address", "http://127.0.0.1:8265"],
        ["--bucket-megabytes", "0"],
    ],
)
def test_a_wrong_call_is_exit_code_2_and_nothing_is_looked_at(words):
    result = CliRunner().invoke(app, ["check", *words])
    assert result.exit_code == 2 and "Usage" in result.output


def test_without_a_requirement_the_one_line_names_it_and_the_remedy():
    program = (
        "import sys; sys.modules['psutil'] = None; from flashrl_verl.cli import main; sys.argv = ['flashrl', 'check']; "
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=400)
    assert done.returncode == 1 and done.stdout.startswith("fail  requirements: psutil is missing")
    assert "pip install psutil" in done.stdout and "Traceback" not in done.stderr


def test_a_report_says_the_verdict_in_words_and_the_remedy_below_it(tmp_path):
    elsewhere = Finding(name="GPU", verdict="not checked", text="none", node="n1")
    findings = [ok("disk", "1 TiB [free]"), fail("port", "taken", "free it"), elsewhere]
    console = Console(width=40, record=True, file=open(os.devnull, "w"))
    command.show(console, findings)
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "fail", "remedy:", "node", "not", "1"]
    assert lines[0].endswith("1 TiB [free]") and lines[2].strip() == "remedy: free it" and lines[3] == "node n1"
    assert lines[-1] == "1 ok, 1 fail, 1 not checked"
    command.write(tmp_path / "check.json", findings)
    written = json.loads((tmp_path / "check.json").read_text())
    assert written["exit_code"] == 1 and [Finding(**f) for f in written["findings"]] == findings


def test_a_report_that_finds_no_space_is_one_error_and_leaves_the_older_one(tmp_path, monkeypatch):
    path = tmp_path / "check.json"
    command.write(path, [ok("disk", "fine")])
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        FlashRLError, match=r"--json .*check\.json cannot be written: No space left on device\. Name a file"
    ):
        command.write(path, [])
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
