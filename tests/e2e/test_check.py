# SPDX-License-Identifier: Apache-2.0
"""`flashrl check` with real verl, vLLM and Ray: a sound machine passes, and each planted fault is found with its
remedy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import planted
import pytest
from local_cluster import LocalCluster, can_hide

import flashrl_verl
from flashrl_verl.plugins.versions import DISTRIBUTION
from flashrl_verl.settings import Precision
from flashrl_verl.tools.check import node, subjects
from flashrl_verl.tools.check.child import run_child
from flashrl_verl.tools.check.devices import nvidia_devices
from flashrl_verl.tools.check.findings import Finding, Verdict
from flashrl_verl.tools.check.settings import CheckSettings

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
OK, WARN, FAIL, SKIPPED = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIPPED
PATIENCE_S = 700
"""Longest time of a child here: a cold machine imports vLLM in a minute."""

SETTINGS = CheckSettings(precisions=("int8",), bucket_megabytes=64, timeout_s=PATIENCE_S)


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """This process's, with folders before the rest of the path, as ``PYTHONPATH`` has them."""
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


def check(tmp_path: Path, *words: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None):
    """Run the command from a folder of its own. Returns exit code, output, and findings by (node, name)."""
    report = tmp_path / "check.json"
    command = [
        *prefix,
        sys.executable,
        "-c",
        "from flashrl_verl.cli import main; main()",
        "check",
        "--json",
        str(report),
    ]
    if "--timeout" not in words:
        words = (*words, "--timeout", str(PATIENCE_S))
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, env=env or environment(), capture_output=True, text=True, timeout=900
    )
    assert "Traceback" not in done.stderr, done.stderr
    findings = [Finding(**finding) for finding in json.loads(report.read_text())["findings"]]
    assert all(finding.text in done.stdout and finding.remedy in done.stdout for finding in findings), done.stdout
    return done.returncode, done.stdout, {(finding.node, finding.name): finding for finding in findings}


def by_name(report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def verl_process(env: dict[str, str]) -> dict[str, Finding]:
    return by_name(run_child("verl_process", subjects.of_verl_process(), SETTINGS, environment=env))


def vllm_process(env: dict[str, str]) -> dict[str, Finding]:
    return by_name(run_child("vllm_process", subjects.of_vllm_process(SETTINGS), SETTINGS, environment=env))


def test_a_sound_machine_passes_and_what_was_not_looked_at_is_not_ok(tmp_path):
    code, output, found = check(tmp_path, "--precision", "int8,fp8,bf16", "--bucket-megabytes", "64")
    failed = [finding for finding in found.values() if finding.verdict is FAIL]
    assert code == 0 and not failed, output
    for name in (*subjects.of_verl_process(), "vLLM plugin", "entry points", "vllm metadata", "loopback"):
        assert found["", name].verdict is OK, name
    for precision in Precision:
        assert found["", subjects.kernel(precision)].verdict is OK
        for subject in subjects.of_precision(precision)[1:]:
            assert "dB against float64" in found["", subject].text
    if not nvidia_devices():
        assert found["", "row kernel"].verdict is SKIPPED and found["", "driver"].verdict is SKIPPED
        assert found["", "INT8 attention"].verdict is SKIPPED


def test_faults_of_one_machine_are_all_found_in_one_call(tmp_path):
    """The order of the faults is that of the report; none hides another."""
    folder = planted.metadata(tmp_path / "path", "transformers", "5.0.0")
    planted.metadata(folder, DISTRIBUTION, "0.0.1", points=planted.POINTS)
    faults = environment(
        folder, VERL_USE_EXTERNAL_PLUGINS="none", VLLM_PLUGINS="lora_filesystem_resolver", GLOO_SOCKET_IFNAME="ib7",
        http_proxy="http://127.0.0.1:9", no_proxy="", NO_PROXY="", RAY_AUTH_MODE="token", HOME=str(tmp_path),
    )  # fmt: skip
    small = planted.with_small(Path("/dev/shm"), 16, []) if can_hide() else ()
    code, output, found = check(tmp_path, "--bucket-megabytes", "64", prefix=tuple(small), env=faults)
    assert code == 1, output
    told = {name: (f.verdict, f.text, f.remedy) for (_, name), f in found.items()}

    def expect(name: str, verdict: Verdict, text: str, remedy: str) -> None:
        assert told[name][0] is verdict and text in told[name][1] and remedy in told[name][2], told[name]

    expect("transformers", FAIL, "5.0.0", "PYTHONPATH")
    expect("imported versions", FAIL, "its metadata in", "remove that metadata")
    expect(f"{DISTRIBUTION} metadata", FAIL, "0.0.1", "remove that metadata")
    expect("verl plugin", FAIL, "VERL_USE_EXTERNAL_PLUGINS=none leaves flashrl out", "unset VERL_USE_EXTERNAL_PLUGINS")
    expect(
        "vLLM plugin", FAIL, "VLLM_PLUGINS=lora_filesystem_resolver", "VLLM_PLUGINS=lora_filesystem_resolver,flashrl"
    )
    expect("network interface", FAIL, "ib7", "GLOO_SOCKET_IFNAME=<one of them>")
    expect("proxy", WARN, "127.0.0.1", "no_proxy=localhost,127.0.0.1")
    expect("Ray token", WARN, "there is no token", "ray get-auth-token --generate")
    if small:
        expect("shared memory", FAIL, "a bucket of weights", "--shm-size")
    assert told["int8 numerics"][0] is SKIPPED and told["verl"][0] is OK


@pytest.mark.slow
def test_a_plugin_that_raises_is_told_although_verl_and_vllm_swallow_it(tmp_path):
    """Metadata of this version whose entry points lead to a module that cannot be imported, or whose function
    raises."""
    folder = planted.module(tmp_path / "path", "broken_plugin", "raise ImportError('cannot import name ServerAdapter')")
    planted.module(folder, "broken_call", "def register():\n    raise RuntimeError('no such registry')")
    points = {"verl.plugins": "broken_plugin", "vllm.general_plugins": "broken_call:register"}
    planted.metadata(folder, DISTRIBUTION, flashrl_verl.__version__, points=points)
    found = {**verl_process(environment(folder)), **vllm_process(environment(folder))}
    assert found["verl plugin"].verdict is FAIL
    assert "broken_plugin raises ImportError: cannot import name ServerAdapter" in found["verl plugin"].text
    assert found["vLLM plugin"].verdict is FAIL
    assert "broken_call:register raises RuntimeError: no such registry" in found["vLLM plugin"].text
    assert found["int8 numerics"].verdict is SKIPPED


@pytest.mark.slow
def test_classes_that_verl_cannot_import_are_told_although_the_plugin_registered(tmp_path):
    """vLLM refuses transformers 4 by its metadata, in the process that asks for the replica."""
    found = verl_process(environment(planted.metadata(tmp_path / "path", "transformers", "4.57.0")))
    assert found["verl plugin"].verdict is FAIL and "Transformers v4" in found["verl plugin"].text
    assert "tested versions" in found["verl plugin"].remedy


@pytest.mark.slow
def test_a_process_without_our_entry_points_is_told(tmp_path):
    folder = planted.metadata(tmp_path / "path", DISTRIBUTION, flashrl_verl.__version__)
    found = {**verl_process(environment(folder)), **vllm_process(environment(folder))}
    for name, group in (("verl plugin", "verl.plugins"), ("vLLM plugin", "vllm.general_plugins")):
        assert found[name].verdict is FAIL and group in found[name].text and "pip install" in found[name].remedy


@pytest.mark.slow
def test_a_kernel_that_gives_nan_in_vllms_processes_is_found(tmp_path):
    """Another package's vLLM plugin replaces the product: the rest of the child's findings stay as they are."""
    text = (
        "def register():\n    from flashrl_verl.quantization import gemm\n    apply = gemm.OneDnnGemm.apply\n"
        "    gemm.OneDnnGemm.apply = lambda *a: apply(*a) * float('nan')\n"
    )
    folder = planted.module(tmp_path / "path", "poisoned_kernel", text)
    points = {"vllm.general_plugins": "poisoned_kernel:register"}
    planted.metadata(folder, "poison", "1.0", points=points, point="poison")
    found = vllm_process(environment(folder))
    assert found["vLLM plugin"].verdict is OK and found["int8 kernel"].verdict is OK
    assert found["int8 numerics"].verdict is FAIL and "NaN" in found["int8 numerics"].text


@pytest.mark.slow
def test_of_two_nodes_the_one_with_a_fault_is_named_and_their_difference_is_one_finding(tmp_path):
    other = planted.metadata(tmp_path / "path", "transformers", "5.0.0")
    with LocalCluster() as cluster:
        cluster.join(variables={"PYTHONPATH": str(other), "VLLM_PLUGINS": "lora_filesystem_resolver"})
        env = environment(RAY_AUTH_MODE="disabled")
        words = ("--address", cluster.address, "--precision", "int8", "--bucket-megabytes", "64")
        code, output, found = check(tmp_path, *words, env=env)
    assert code == 1, output
    assert found["", "cluster"].verdict is OK and "2 node(s)" in found["", "cluster"].text
    nodes = sorted({where for where, _ in found} - {""})
    assert [where.partition(" ")[0] for where in nodes] == ["127.0.0.2", "127.0.0.3"], output
    sound, faulty = nodes
    assert [name for (where, name), f in found.items() if where == sound and f.verdict is FAIL] == []
    assert found[sound, "int8 numerics"].verdict is OK
    for where in nodes:
        assert f"free for Ray in {cluster.folder}" in found[where, "disk"].text, (
            "its own --temp-dir, not this process's"
        )
    assert found[sound, f"{DISTRIBUTION} metadata"].text.endswith("sent by Ray")
    failed = {name for (where, name), f in found.items() if where == faulty and f.verdict is FAIL}
    assert failed == {"transformers", "imported versions", "vLLM plugin"}, output
    assert found[faulty, "vLLM plugin"].remedy.endswith("on every node before `ray start`")
    alike = found["", "nodes alike"]
    assert alike.verdict is FAIL and f"against 5.0.0 on {faulty}" in alike.text and "verl:" not in alike.text


@pytest.mark.slow
def test_another_release_on_a_node_is_found_where_no_code_is_shipped_and_a_missing_token_before_that(tmp_path):
    other = tmp_path / "path" / "flashrl_verl"
    shutil.copytree(ROOT / "flashrl_verl", other, ignore=shutil.ignore_patterns("__pycache__"))
    (other / "__init__.py").write_text((other / "__init__.py").read_text().replace(flashrl_verl.__version__, "0.0.9"))
    with LocalCluster(variables={"PYTHONPATH": str(ROOT)}) as cluster:
        cluster.join(variables={"PYTHONPATH": str(other.parent)})
        words = ("--address", cluster.address, "--no-ship-code", "--precision", "bf16", "--bucket-megabytes", "64")
        home = {"HOME": str(tmp_path)}
        refused, output, found = check(tmp_path, *words, env=environment(RAY_AUTH_MODE="token", **home))
        assert refused == 1 and found["", "cluster"].verdict is FAIL, output
        assert "no token" in found["", "Ray token"].text and "auth_token" in found["", "cluster"].remedy
        code, output, found = check(tmp_path, *words, env=environment(RAY_AUTH_MODE="disabled", **home))
    assert code == 1, output
    sound, faulty = sorted({where for where, _ in found} - {""})
    assert [name for (where, name), f in found.items() if where == sound and f.verdict is FAIL] == [], output
    stale = found[faulty, f"{DISTRIBUTION} metadata"]
    assert (
        stale.verdict is FAIL
        and "the code in" in stale.text
        and "is 0.0.9" in stale.text
        and "pip install" in stale.remedy
    )
    alike = found["", "nodes alike"]
    assert alike.verdict is FAIL and f"against 0.0.9 ({node.checksum(other)}) on {faulty}" in alike.text
    assert "flashrl.ship_code=true" in alike.remedy


def test_an_address_where_no_cluster_is_ends_with_the_remedy(tmp_path):
    code, output, found = check(tmp_path, "--address", "127.0.0.1:9")
    cluster = found["", "cluster"]
    assert code == 1 and cluster.verdict is FAIL and "nothing listens at 127.0.0.1:9" in cluster.text, output
    assert "ray start --head" in cluster.remedy
    assert found["", "nodes alike"].verdict is SKIPPED
