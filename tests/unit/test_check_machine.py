# SPDX-License-Identifier: Apache-2.0
"""Planted faults of a machine: little shared memory, a full disk, few files, addresses and interfaces that are not
there, proxies, no token. Each is looked at without the fault too."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import planted
import pytest
from local_cluster import can_hide

from flashrl_verl.tools.check import memory, network, node, ray_access
from flashrl_verl.tools.check.devices import nvidia_devices
from flashrl_verl.tools.check.findings import Verdict
from flashrl_verl.tools.check.settings import CheckSettings

OK, WARN, FAIL, SKIPPED = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIPPED
ROOT = Path(__file__).parents[2]
namespaces = pytest.mark.skipif(not can_hide(), reason="processes cannot be given a file system of their own here")


def only(findings):
    [finding] = findings
    return finding


def run(words: list[str], environment: dict[str, str] | None = None) -> dict:
    """The finding that a command of ``planted.told`` prints."""
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return only(json.loads(done.stdout))


# ---- memory, disk, files ----


@namespaces
@pytest.mark.parametrize(
    ("megabytes", "bucket", "gpus", "verdict"),
    [
        *((64, 128, 0, "fail"), (64, 16, 0, "warn"), (1000000, 128, 0, "ok")),
        *((32, None, 0, "fail"), (1000, None, 0, "warn"), (1000000, None, 0, "ok")),  # the quickstart's 64, verl's 2048
        *((64, None, 8, "fail"), (2000, None, 8, "warn")),
    ],
)
def test_shared_memory_is_compared_with_the_bucket_on_a_cpu_and_the_queues_on_a_gpu(megabytes, bucket, gpus, verdict):
    call = f"check_shared_memory('/dev/shm', {bucket}, {gpus})"
    finding = run(planted.with_small(Path("/dev/shm"), megabytes, planted.told("memory", call)))
    assert finding["verdict"] == verdict, finding
    assert "/dev/shm" in finding["text"]
    if verdict != "ok":
        assert "--shm-size" in finding["remedy"]
    if verdict == "fail" and not gpus:
        assert f"{memory.BUCKET_KEY}={bucket or 64}" in finding["text"] and memory.BUCKET_KEY in finding["remedy"]
    if verdict == "ok":
        assert f"{memory.BUCKET_KEY}={bucket or 2048}" in finding["text"]
    if (megabytes, bucket) == (1000, None):
        assert f"{memory.BUCKET_KEY}=2048" in finding["text"] and "--bucket-megabytes" in finding["remedy"]


@namespaces
def test_where_no_rank_comes_little_shared_memory_is_rays_concern_alone():
    call = "check_shared_memory('/dev/shm', 128, 0, ranks=False)"
    finding = run(planted.with_small(Path("/dev/shm"), 16, planted.told("memory", call)))
    assert finding["verdict"] == "warn" and "object store" in finding["text"] and "bucket" not in finding["text"]


@pytest.mark.skipif(nvidia_devices() > 0, reason="beside a GPU no bucket lies in shared memory")
@pytest.mark.parametrize(("gpus", "needs"), [(0, False), (1, True)])
def test_a_node_needs_room_for_a_bucket_only_where_it_offers_ray_a_gpu(gpus, needs):
    settings = CheckSettings(bucket_megabytes=1 << 40)  # no shared memory is as large
    finding = next(node.check_machine(settings, node.Member(address="127.0.0.1", gpus=gpus)))
    assert finding.name == "shared memory" and (finding.verdict is FAIL) == needs, finding


def test_the_default_bucket_is_verls_own_and_the_quickstarts_is_smaller():
    import verl.workers.config

    assert (
        memory.verl_bucket_megabytes() == verl.workers.config.CheckpointEngineConfig().update_weights_bucket_megabytes
    )
    assert 0 < memory.quickstart_bucket_megabytes() < memory.verl_bucket_megabytes()
    free = 1 << 40  # no shared memory is as large as a bucket of a PiB
    assert only(memory.check_shared_memory("/dev/shm", free, 0)).verdict is FAIL


@namespaces
@pytest.mark.parametrize(("megabytes", "fill", "verdict"), [(40, 39, "fail"), (40, 1, "warn"), (20000, 1, "ok")])
@pytest.mark.parametrize("folder", ["", "not/yet/ray"])  # Ray makes its folder
def test_a_disk_that_is_nearly_full_is_told_before_ray_stops_writing(tmp_path, megabytes, fill, verdict, folder):
    call = f"check_disk(pathlib.Path({str(tmp_path / folder)!r}))"
    finding = run(planted.with_small(tmp_path, megabytes, planted.told("memory", call), fill))
    assert finding["verdict"] == verdict, finding
    assert str(tmp_path / folder) in finding["text"]
    assert verdict == "ok" or "--temp-dir" in finding["remedy"]


@namespaces
@pytest.mark.parametrize(
    ("small", "variables", "verdict"),
    [
        ("here", {"TMPDIR": "here"}, "fail"),
        ("here", {"RAY_TMPDIR": "here", "TMPDIR": "there"}, "fail"),
        ("here", {"RAY_TMPDIR": "there", "TMPDIR": "here"}, "fine"),
        ("here", {}, "fine"),
    ],
)
def test_the_disk_is_the_one_that_ray_takes_by_the_variables_of_the_process(tmp_path, small, variables, verdict):
    """As ``get_default_ray_temp_dir`` does: RAY_TMPDIR, then TMPDIR, then /tmp."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    clean = {name: value for name, value in os.environ.items() if name not in ("RAY_TMPDIR", "TMPDIR")}
    environment = {**clean, **{name: str(tmp_path / value) for name, value in variables.items()}}
    words = planted.with_small(tmp_path / small, 40, planted.told("memory", "check_disk(memory.ray_folder())"), fill=39)
    finding = run(words, environment)
    assert (finding["verdict"] == "fail") == (verdict == "fail"), finding
    folder = tmp_path / next(iter(variables.values())) if variables else Path("/tmp")
    assert str(folder / "ray") in finding["text"]


@pytest.mark.parametrize(("files", "verdict"), [(256, "fail"), (4096, "ok")])
def test_a_hard_limit_of_few_open_files_is_a_failure(files, verdict):
    words = planted.told("memory", "check_open_files()")
    limit = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({files},) * 2); "
    limit += "os.execv(sys.argv[1], sys.argv[1:])"
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < files:
        pytest.skip("this machine allows fewer open files")
    finding = run([sys.executable, "-c", limit, *words])
    assert finding["verdict"] == verdict and str(files) in finding["text"]
    assert verdict == "ok" or "ulimit" in finding["remedy"]


# ---- network ----


def test_loopback_answers_on_as_many_addresses_as_there_are_replicas():
    finding = only(network.check_loopback(8))
    assert finding.verdict is OK and "127.0.0.8" in finding.text


@pytest.mark.parametrize("address", ["203.0.113.7", "256.0.0.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_machines_is_a_failure(address):
    finding = only(network.check_node_address(address))
    assert finding.verdict is FAIL and address in finding.text and "--node-ip-address" in finding.remedy


def test_an_address_of_this_machine_is_ok():
    assert only(network.check_node_address("127.0.0.3")).verdict is OK


def test_a_host_name_without_an_address_is_told():
    finding = only(network.check_host_name("no-such-host.invalid", None))
    assert finding.verdict is WARN and "/etc/hosts" in finding.remedy and "GLOO_SOCKET_IFNAME" in finding.remedy


def test_a_host_name_on_loopback_matters_where_other_nodes_are():
    for address in (None, "127.0.0.2"):
        assert only(network.check_host_name("localhost", address)).verdict is OK
    finding = only(network.check_host_name("localhost", "203.0.113.7"))
    assert finding.verdict is WARN and "GLOO_SOCKET_IFNAME" in finding.remedy


@pytest.mark.parametrize(
    ("variable", "value", "verdict"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", OK),
        ("GLOO_SOCKET_IFNAME", "ib7", FAIL),
        ("GLOO_SOCKET_IFNAME", "l", FAIL),  # exact, where NCCL takes a prefix
        ("NCCL_SOCKET_IFNAME", "l", OK),
        ("NCCL_SOCKET_IFNAME", "=l", FAIL),
        ("NCCL_SOCKET_IFNAME", "=lo", OK),
        ("NCCL_SOCKET_IFNAME", "ib7,lo", OK),
        ("NCCL_SOCKET_IFNAME", "^ib7", OK),
        ("NCCL_SOCKET_IFNAME", "ib7", FAIL),
    ],
)
def test_an_interface_that_does_not_exist_is_a_failure(variable, value, verdict):
    finding = only(network.check_interfaces({variable: value}))
    assert finding.verdict is verdict and f"{variable}={value}" in finding.text
    assert verdict is OK or "lo" in finding.text
    assert list(network.check_interfaces({})) == []


@pytest.mark.parametrize(
    ("environment", "verdict"),
    [
        ({}, OK),
        ({"https_proxy": "http://proxy:3128"}, OK),
        ({"http_proxy": ""}, OK),
        ({"http_proxy": "http://proxy:3128"}, WARN),
        ({"HTTP_PROXY": "http://proxy:3128", "no_proxy": "example.org"}, WARN),
        ({"ALL_PROXY": "socks5://proxy:1080"}, WARN),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"}, WARN),  # the node's address is left
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1,203.0.113.7"}, OK),
        ({"http_proxy": "http://proxy:3128", "NO_PROXY": "*"}, OK),
    ],
)
def test_a_proxy_between_the_machine_and_itself_is_told(environment, verdict):
    finding = only(network.check_proxy(environment, "203.0.113.7"))
    assert finding.verdict is verdict
    if verdict is WARN:
        assert finding.remedy == "export no_proxy=localhost,127.0.0.1,203.0.113.7" and "203.0.113.7" in finding.text


def test_what_the_proxy_check_says_of_clients_is_so(tmp_path):
    """requests and httpx ask the proxy, aiohttp (verl's) and http.client (ours) do not; no_proxy helps."""
    program = (
        "import asyncio, http.client, http.server, json, os, threading, aiohttp, httpx, requests\nserver = "
        "http.server.ThreadingHTTPServer(('127.0.0.1', 0), "
        "http.server.BaseHTTPRequestHandler)\nthreading.Thread(target=server.serve_forever, daemon=True).start()\nurl "
        "= f'http://127.0.0.1:{server.server_port}/'\nasync def by_aiohttp():\n    async with aiohttp.ClientSession() "
        "as session, session.get(url) as answer: return answer.status\ndef by_http_client():\n    connection = "
        "http.client.HTTPConnection('127.0.0.1', server.server_port); connection.request('GET', '/')\n    return "
        "connection.getresponse().status\nways = "
        "{'requests': lambda: requests.get(url).status_code, 'httpx': lambda: httpx.get(url).status_code,\n        "
        "'aiohttp': lambda: asyncio.run(by_aiohttp()), 'http.client': by_http_client}\ntold = {}\nfor name, way in "
        "ways.items():\n    try: told[name] = way()\n    except Exception as error: told[name] = "
        "type(error).__name__\nprint(json.dumps(told))\n"
    )
    (tmp_path / "program.py").write_text(program)

    def ask(**variables) -> dict:
        clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        words = [sys.executable, str(tmp_path / "program.py")]
        done = subprocess.run(
            words, env={**clean, **variables}, capture_output=True, text=True, check=True, timeout=400
        )
        return json.loads(done.stdout)

    there = 501  # BaseHTTPRequestHandler knows no GET: the server was reached
    nowhere = "http://127.0.0.1:9"
    assert ask(http_proxy=nowhere) == {
        "requests": "ProxyError", "httpx": "ConnectError", "aiohttp": there, "http.client": there,
    }  # fmt: skip
    assert set(ask(http_proxy=nowhere, no_proxy="localhost,127.0.0.1").values()) == {there}


# ---- Ray's token ----


@pytest.mark.parametrize(
    ("environment", "token", "joins", "verdict"),
    [
        ({"RAY_AUTH_MODE": "token"}, False, True, FAIL),
        ({"RAY_AUTH_MODE": "token"}, False, False, WARN),
        ({"RAY_AUTH_MODE": "token"}, True, True, OK),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}, False, True, OK),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/no/such/file"}, True, True, FAIL),
        ({}, True, True, WARN),
        ({}, False, True, WARN),
        ({"RAY_AUTH_MODE": "disabled"}, True, True, WARN),
        ({}, False, False, SKIPPED),
    ],
)
def test_token_mode_needs_a_token(tmp_path, environment, token, joins, verdict):
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("not a real one")
    finding = only(ray_access.check_token(environment, tmp_path, joins))
    assert finding.verdict is verdict
    assert verdict not in (WARN, FAIL) or "RAY_AUTH_MODE=token" in finding.remedy or "get-auth-token" in finding.remedy
    assert "not a real one" not in finding.text + finding.remedy
