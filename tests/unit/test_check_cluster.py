# SPDX-License-Identifier: Apache-2.0
"""Differences between nodes are one finding, and what keeps the nodes from being asked has its remedy."""

import os
import shutil
import tempfile
from pathlib import Path

import planted
import pytest
import ray

import flashrl_verl
from flashrl_verl.plugins.versions import DISTRIBUTION, TESTED
from flashrl_verl.tools.check import cluster, command, memory, node
from flashrl_verl.tools.check.findings import Verdict
from flashrl_verl.tools.check.settings import CheckSettings

SAME = {"Python": "3.12.3", "vllm": "0.24.0", DISTRIBUTION: "0.1.0 (abc)"}


def with_gpus(names: str) -> dict[str, str]:
    return {**SAME, "GPUs": names}


def test_nodes_that_are_alike_are_ok():
    [finding] = cluster.compare(SAME, {"n1": with_gpus("H200"), "n2": with_gpus("H200")})
    assert finding.verdict is Verdict.OK and "3 processes" in finding.text


@pytest.mark.parametrize("nodes", [{}, {"n1": None}, {"n1": None, "n2": None}])
def test_a_driver_that_nobody_answered_is_not_called_alike(nodes):
    first, *more = cluster.compare(SAME, nodes)
    assert (first.verdict, first.text) == (Verdict.SKIPPED, "no node answered")
    assert {finding.verdict for finding in more} <= {Verdict.SKIPPED}


def test_a_node_that_did_not_answer_is_named_and_the_rest_is_not_called_ok():
    alike, gpus = cluster.compare(SAME, {"n1": with_gpus("H200"), "n2": None, "n3": with_gpus("H200")})
    assert alike.verdict is Verdict.SKIPPED and "n2 did not answer" in alike.text and "3 processes" in alike.text
    assert gpus.verdict is Verdict.SKIPPED and gpus.text == "unknown of n2"
    different, _ = cluster.compare(SAME, {"n1": {**SAME, "vllm": "0.27.1"}, "n2": None})
    assert different.verdict is Verdict.FAIL and "unknown of n2" in different.text


def test_a_node_whose_gpus_nobody_could_look_at_is_named():
    """Its child process that imports vLLM crashed: of the rest there are facts."""
    alike, gpus = cluster.compare(SAME, {"n1": with_gpus("H200"), "n2": SAME})
    assert alike.verdict is Verdict.OK
    assert gpus.verdict is Verdict.SKIPPED and gpus.text == "unknown of n2"


def test_all_differences_of_software_are_one_failure_that_says_who_has_what():
    other = {**SAME, "vllm": "0.27.1", DISTRIBUTION: "0.1.0 (def)"}
    [finding] = (f for f in cluster.compare(SAME, {"n1": SAME, "n2": other}) if f.verdict is Verdict.FAIL)
    assert "vllm: 0.24.0 on driver, n1 against 0.27.1 on n2" in finding.text
    assert "(abc) on driver, n1 against 0.1.0 (def) on n2" in finding.text and "Python" not in finding.text
    assert "one environment for all nodes" in finding.remedy


def test_gpus_of_two_kinds_are_a_warning_and_a_head_without_any_is_none():
    alike = cluster.compare(SAME, {"head": with_gpus("none"), "n1": with_gpus("H200")})
    assert [finding.verdict for finding in alike] == [Verdict.OK]
    _, finding = cluster.compare(SAME, {"n1": with_gpus("H200, H200"), "n2": with_gpus("A100, A100")})
    assert finding.verdict is Verdict.WARN and "n1: 2 x H200; n2: 2 x A100" in finding.text and "kind" in finding.remedy


def test_fewer_gpus_of_the_same_kind_are_a_warning_of_their_number():
    _, finding = cluster.compare(
        SAME, {"n1": with_gpus(", ".join(["H200"] * 8)), "n2": with_gpus(", ".join(["H200"] * 4))}
    )
    assert finding.verdict is Verdict.WARN and "n1: 8 x H200; n2: 4 x H200" in finding.text
    assert "trainer.n_gpus_per_node" in finding.remedy and "kind" not in finding.remedy


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("Token authentication is enabled but no authentication token was found", "auth_token"),
        ("Unauthenticated: InvalidAuthToken: Authentication token is missing or incorrect", "auth_token"),
        ("Version mismatch: The cluster was started with:\n    Ray: 2.59.0", "the same Python and ray"),
        ("Could not find any running Ray instance.", "ray start --head"),
    ],
)
def test_a_cluster_that_cannot_be_joined_has_the_remedy_of_its_error(error, remedy):
    assert remedy in cluster._remedy(error)


def test_a_node_without_this_package_is_told_how_it_gets_it():
    error = ImportError("Traceback\nModuleNotFoundError: No module named 'flashrl_verl'")
    assert "flashrl.ship_code=true" in cluster._no_worker(error, shipped=False).remedy
    assert "flashrl.ship_code" not in cluster._no_worker(OSError("worker died"), shipped=True).remedy


def test_facts_have_every_version_and_the_code():
    facts = node.facts()
    assert set(facts) == {"Python", *TESTED, DISTRIBUTION}
    assert facts[DISTRIBUTION] == f"{flashrl_verl.__version__} ({node.checksum()})"


def test_the_checksum_follows_contents_and_names_of_code_and_yaml_alone(tmp_path):
    copy = tmp_path / "flashrl_verl"
    shutil.copytree(Path(flashrl_verl.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    same = node.checksum()
    (copy / "notes.txt").write_text("not code")
    assert node.checksum(copy) == same
    (copy / "configs" / "precision" / "int8.yaml").open("a").write("\n")
    changed = node.checksum(copy)
    (copy / "errors.py").rename(copy / "mistakes.py")
    assert len({same, changed, node.checksum(copy)}) == 3


# ---- a live Ray of one node ----

HANG = (
    "import os, sys, time\n"
    "if any(word.endswith('default_worker.py') for word in sys.orig_argv) and os.path.exists({!r}): time.sleep(600)\n"
)
"""``sitecustomize`` of a node whose workers start no more once a file is there."""


@pytest.fixture(scope="module")
def ray_node(tmp_path_factory):
    """Address of a Ray with a folder of its own, that folder, and the file that makes new workers hang."""
    here = tmp_path_factory.mktemp("node")
    folder = Path(tempfile.mkdtemp(prefix="flr-", dir="/tmp"))  # short: paths of sockets stay under 107 letters
    planted.module(here, "sitecustomize", HANG.format(str(here / "hang")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]))
        context = ray.init("local", num_cpus=1, num_gpus=1, include_dashboard=False, _temp_dir=str(folder / "ray"))
        try:
            yield context.address_info["gcs_address"], folder / "ray", here / "hang"
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def test_the_disk_of_a_node_is_the_one_its_ray_was_started_with(ray_node, monkeypatch):
    """--temp-dir is the remedy of a full disk: after it another disk has to be looked at."""
    monkeypatch.setenv("RAY_TMPDIR", "/no/such/folder")
    folder = ray.get(ray.remote(memory.ray_folder).options(num_cpus=0).remote())
    assert folder == ray_node[1]
    assert f"free for Ray in {folder}" in next(memory.check_disk(folder)).text


def test_a_node_that_hangs_is_named_before_the_process_that_asks_is_stopped(ray_node):
    address, _, hang = ray_node
    hang.touch()
    findings = command.look(CheckSettings(timeout_s=1, ray_start_s=2, ship_code=False), address)
    failed = [finding for finding in findings if finding.name == "cluster" and finding.verdict is Verdict.FAIL]
    assert [(f.node.partition(" ")[0], f.text) for f in failed] == [
        (address.partition(":")[0], "did not answer within 3 s")
    ]
    assert [(f.verdict, f.text) for f in findings if f.name == "nodes alike"] == [(Verdict.SKIPPED, "no node answered")]
