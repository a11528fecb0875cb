# SPDX-License-Identifier: Apache-2.0
"""`flashrl check` with real verl, vLLM and Ray: a sound machine passes, and planted faults are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import LocalCluster

pytestmark = [pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]

POISON = """
def register():
    from flashrl_verl.quantization import gemm
    multiply = gemm.emulated_multiply
    gemm.emulated_multiply = lambda *words: multiply(*words) * 1.1
"""
"""Another package's vLLM plugin, after which products are wrong."""


def planted(folder: Path, name: str, version: str, points: dict[str, str] | None = None) -> Path:
    """A place for ``PYTHONPATH`` with a package's metadata alone; ``points``: group -> entry point."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("".join(f"[{g}]\n{name} = {v}\n" for g, v in (points or {}).items()))
    return folder


def check(tmp_path: Path, *words: str, folders: tuple[Path, ...] = (), **variables: str) -> tuple[int, list[str]]:
    """Run the command; exit status and lines."""
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    inherited = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}  # other tests set it
    done = subprocess.run(
        [sys.executable, "-c", "from flashrl_verl.cli import main; main()", "check", *words],
        cwd=tmp_path, env={**inherited, "PYTHONPATH": path, **variables}, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def with_level(lines: list[str], level: str) -> dict[str, str]:
    """Subject -> text."""
    found = (line.removeprefix(level).strip() for line in lines if line.startswith(level))
    return {line[:14].strip(): line[14:].strip() for line in found}


@pytest.mark.slow
def test_a_sound_machine_passes(tmp_path):
    code, lines = check(tmp_path)
    assert code == 0 and not with_level(lines, "error"), lines
    expected = {"Python", "verl", "vllm", "memory", "shared memory", "vLLM plugin", "device", "int8", "fp8"}
    assert expected | {"verl plugin"} <= {*with_level(lines, "ok")}, lines


def test_faults_of_one_machine_are_all_found_in_one_call(tmp_path):
    folder = planted(tmp_path / "path", "transformers", "5.0.0")
    (folder / "poisoned_kernel.py").write_text(POISON)
    planted(folder, "poison", "1.0", points={"vllm.general_plugins": "poisoned_kernel:register"})
    code, lines = check(tmp_path, folders=(folder,), VERL_USE_EXTERNAL_PLUGINS="none")
    errors = with_level(lines, "error")
    assert code == 1 and {*errors} == {"verl plugin", "int8", "fp8"}, lines
    assert "transformers" in with_level(lines, "warning"), lines
    assert {"vllm", "vLLM plugin"} <= {*with_level(lines, "ok")}, lines
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves flashrl out. Remedy: unset" in errors["verl plugin"], lines
    wrong = errors["int8"]
    assert "products" in wrong and "codes" not in wrong and "Remedy: do not train with it" in wrong, wrong


@pytest.mark.slow
def test_of_two_nodes_the_one_with_faults_is_named(tmp_path):
    other = planted(tmp_path / "path", "transformers", "5.0.0")
    with LocalCluster() as cluster:
        cluster.join(variables={"PYTHONPATH": str(other), "VLLM_PLUGINS": "lora_filesystem_resolver"})
        code, lines = check(tmp_path, "--cluster", RAY_ADDRESS=cluster.address, RAY_AUTH_MODE="disabled")
    assert code == 1, lines
    errors = [line for line in lines if line.startswith("error")]
    assert len(errors) == 2 and all("127.0.0.3 " in line for line in errors), lines
    assert "transformers 5.0.0, but " in errors[0]
    assert "VLLM_PLUGINS=lora_filesystem_resolver leaves flashrl out" in errors[1]
    sound = with_level(lines, "ok")
    assert "vLLM plugin" in sound["127.0.0.2"] and "vLLM plugin" not in sound["127.0.0.3"], lines
    assert "int8" in sound["127.0.0.2"] and "verl plugin" in sound["127.0.0.3"], lines


def test_an_address_where_no_cluster_is_ends_with_the_remedy(tmp_path):
    code, lines = check(tmp_path, "--cluster", RAY_ADDRESS="127.0.0.1:9")
    errors = with_level(lines, "error")
    assert code == 1 and {*errors} == {"cluster"}
    assert "127.0.0.1:9" in lines[0] and "ray start --head" in lines[0]
