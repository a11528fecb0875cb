# SPDX-License-Identifier: Apache-2.0
"""`flashrl check` with real verl, vLLM and Ray: a sound machine passes, and planted faults are found."""

import os
import subprocess
import sys
from pathlib import Path

import planted
import pytest
from local_cluster import LocalCluster

pytestmark = [pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]

POISON = """
def register():
    from flashrl_verl.quantization.linear import QuantizedLinearMethod
    apply = QuantizedLinearMethod.apply
    QuantizedLinearMethod.apply = lambda *words: apply(*words) * 1.1
"""
"""Another package's vLLM plugin: its scales are wrong in vLLM's processes alone."""


def check(tmp_path: Path, *words: str, folders: tuple[Path, ...] = (), **variables: str) -> tuple[int, list[str]]:
    """Run the command; exit status and lines."""
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", "from flashrl_verl.cli import main; main()", "check", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, **variables}, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def with_level(lines: list[str], level: str) -> list[str]:
    """Of lines that start so, what follows up to the finding's text."""
    return [line.removeprefix(level).strip() for line in lines if line.startswith(level)]


def subjects(lines: list[str], level: str) -> set[str]:
    return {line.partition(":")[0] for line in with_level(lines, level)}


@pytest.mark.slow
def test_a_sound_machine_passes(tmp_path):
    code, lines = check(tmp_path, "--precision", "int8,fp8,bf16")
    assert code == 0 and not subjects(lines, "error"), lines
    expected = {"Python", "verl", "vllm", "flashrl-verl", "network", "verl plugin", "vLLM plugin", "device"}
    assert expected | {"int8 numerics", "fp8 numerics", "bf16 numerics"} <= subjects(lines, "ok"), lines


def test_faults_of_one_machine_are_all_found_in_one_call(tmp_path):
    folder = planted.metadata(tmp_path / "path", "transformers", "5.0.0")
    planted.module(folder, "poisoned_kernel", POISON)
    planted.metadata(folder, "poison", "1.0", points={"vllm.general_plugins": "poisoned_kernel:register"})
    code, lines = check(tmp_path, folders=(folder,), VERL_USE_EXTERNAL_PLUGINS="none")
    assert code == 1 and subjects(lines, "error") == {"verl plugin", "int8 numerics"}, lines
    assert "transformers" in subjects(lines, "warning"), lines
    assert {"vllm", "vLLM plugin", "bf16 numerics"} <= subjects(lines, "ok"), lines
    told = " ".join(lines)
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves flashrl out. Remedy: unset" in told, lines
    wrong = with_level(lines, "error")[1]
    assert "linear layer" in wrong and "codes" not in wrong and "Remedy: do not train with it" in wrong, wrong


@pytest.mark.slow
def test_of_two_nodes_the_one_with_faults_is_named_and_their_difference_is_one_error(tmp_path):
    other = planted.metadata(tmp_path / "path", "transformers", "5.0.0")
    with LocalCluster() as cluster:
        cluster.join(variables={"PYTHONPATH": str(other), "VLLM_PLUGINS": "lora_filesystem_resolver"})
        variables = {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}
        code, lines = check(tmp_path, "--cluster", "--precision", "int8", **variables)
    assert code == 1, lines
    errors = with_level(lines, "error")
    assert [error.partition(" ")[0] for error in errors] == ["127.0.0.3", "versions:"], lines
    assert "VLLM_PLUGINS=lora_filesystem_resolver leaves flashrl out" in errors[0]
    assert errors[1].count(" is ") == 1 and "but 5.0.0 on 127.0.0.3" in errors[1]
    sound, faulty = (line for line in with_level(lines, "ok") if ": node: " in line)
    assert sound.startswith("127.0.0.2") and "int8 numerics" in sound and "GiB of memory" in sound
    assert faulty.startswith("127.0.0.3") and "verl plugin" in faulty and "int8 numerics" not in faulty


def test_an_address_where_no_cluster_is_ends_with_the_remedy(tmp_path):
    code, lines = check(tmp_path, "--cluster", RAY_ADDRESS="127.0.0.1:9")
    assert code == 1 and subjects(lines, "error") == {"cluster"}
    assert "127.0.0.1:9" in lines[0] and "ray start --head" in lines[0]
