# SPDX-License-Identifier: Apache-2.0
"""`flashrl check`: each fault of a machine is one finding with its remedy, and wrong numbers are not called ok."""

import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import planted
import pytest
import references
import torch

import flashrl_verl
from flashrl_verl.plugins.versions import DISTRIBUTION, INSTALL_COMMAND, TESTED
from flashrl_verl.plugins.vllm import register
from flashrl_verl.quantization.formats import FP8, INT8
from flashrl_verl.quantization.linear import QuantizedLinearMethod
from flashrl_verl.settings import KVCache, Precision
from flashrl_verl.tools.check import cluster, kernels, machine

CPU = torch.device("cpu")


def only(findings):
    [finding] = findings
    return finding


# ---- versions ----


def test_an_untested_version_is_a_warning_and_a_missing_package_an_error_with_the_command(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(planted.metadata(tmp_path, "transformers", "5.0.0"))
    gone = dataclasses.replace(TESTED["ray"], module="no_such_module", distributions=("no-such",))
    monkeypatch.setattr(machine, "TESTED", {**TESTED, "ray": gone})
    found = {finding.subject: finding for finding in machine.check_versions()}
    assert (found["verl"].level, found["transformers"].level, found["ray"].level) == ("ok", "warning", "error")
    assert "5.0.0" in found["transformers"].text and INSTALL_COMMAND in found["ray"].text


def test_metadata_of_another_release_of_this_package_is_an_error(tmp_path, monkeypatch):
    assert only(machine.check_package()).level == "ok"
    monkeypatch.syspath_prepend(planted.metadata(tmp_path, DISTRIBUTION, "0.0.1"))
    found = only(machine.check_package())
    assert found.level == "error" and "0.0.1" in found.text and "pip install" in found.remedy


# ---- memory, network ----


@pytest.mark.parametrize("gpus, free, level", [(0, 4 << 30, "ok"), (0, 64 << 20, "warning"), (8, 64 << 20, "error")])
def test_shared_memory_that_is_too_small_has_the_remedy(tmp_path, monkeypatch, gpus, free, level):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(machine, "gpus", lambda: [("NVIDIA H200", 140_000, 143_771)] * gpus)
    found = only(machine.check_shared_memory(tmp_path))
    assert found.level == level
    assert level == "ok" or "--shm-size" in found.remedy and (gpus or machine.BUCKET_KEY in found.remedy)


@pytest.mark.parametrize(
    "variable, value, level",
    [
        ("GLOO_SOCKET_IFNAME", "lo", "ok"),
        ("GLOO_SOCKET_IFNAME", "ib7", "error"),
        ("NCCL_SOCKET_IFNAME", "ib,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "=ib7", "error"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
    ],
)
def test_an_interface_that_this_machine_does_not_have_is_an_error(monkeypatch, variable, value, level):
    monkeypatch.setenv(variable, value)
    found = only(machine.check_network("127.0.0.1"))
    assert found.level == level and (level == "ok" or "lo" in found.text)


def test_a_host_name_that_is_loopback_is_told_in_a_cluster(monkeypatch):
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "localhost")
    found = only(f for f in machine.check_network("192.0.2.1") if f.level == "warning")
    assert "127.0.0.1" in found.text and "GLOO_SOCKET_IFNAME" in found.remedy
    assert not [f for f in machine.check_network(None) if f.level != "ok"]


def test_an_address_that_is_not_this_machines_is_an_error(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = only(machine.check_network("192.0.2.1"))
    assert found.level == "error" and "192.0.2.1" in found.text and "--node-ip-address" in found.remedy


# ---- fresh processes ----


def test_a_process_that_crashes_or_hangs_is_an_error_with_its_last_words(tmp_path, monkeypatch):
    planted.module(tmp_path, "verl", "import os\nprint('no such instruction', flush=True)\nos.abort()\n")
    planted.module(tmp_path, "vllm", "import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{flashrl_verl.__path__[0]}/..")
    monkeypatch.setattr(machine, "LIMIT_S", 10.0)
    crashed, hung = machine.fresh_processes([Precision.INT8], KVCache.AUTO)
    assert crashed.level == hung.level == "error"
    assert "ended with -6" in crashed.text and "no such instruction" in crashed.text
    assert "did not end within 10 s" in hung.text


# ---- kernels ----


@pytest.mark.parametrize("fmt", [INT8, FP8], ids=lambda fmt: fmt.name)
def test_the_reference_is_that_of_a_second_implementation(fmt):
    rows = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = kernels.exact_rows(rows, fmt)
    expected, expected_scales = references.quantize(rows, fmt.name)
    np.testing.assert_array_equal(codes.double().numpy(), expected)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)


def numerics(precision: Precision = Precision.INT8):
    register()
    return only(kernels.check_precision(precision, [CPU]))


def test_a_wrong_scale_in_storage_is_an_error(monkeypatch):
    load = kernels.load

    def wrongly(built, weights):
        load(built, weights)
        kernels.experts(built).w2_weight_scale.data[2, 7] *= 1.0001

    monkeypatch.setattr(kernels, "load", wrongly)
    found = numerics()
    assert found.level == "error" and "w2 are not exact" in found.text and "do not train" in found.remedy


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_linear_kernel_with_one_wrong_scale_or_nan_is_an_error(monkeypatch, factor):
    apply = QuantizedLinearMethod.apply

    def wrongly(self, layer, x, bias=None):
        output = apply(self, layer, x, bias)
        output[:, 7] *= factor
        return output

    monkeypatch.setattr(QuantizedLinearMethod, "apply", wrongly)
    found = numerics()
    assert found.level == "error" and "linear layer" in found.text and "experts" not in found.text


def test_experts_with_a_wrong_token_are_an_error(monkeypatch):
    run = kernels.run_experts
    monkeypatch.setattr(kernels, "run_experts", lambda layer, x, logits: run(layer, x, logits.roll(len(x) // 32, 0)))
    found = numerics()
    assert found.level == "error" and "experts" in found.text and "linear" not in found.text


def test_a_kv_cache_that_nothing_computes_here_is_refused_with_the_remedy():
    if torch.cuda.is_available():
        pytest.skip("a GPU has its attention")
    with pytest.raises(ValueError, match="Set flashrl.kv_cache=auto"):
        list(kernels.check_attention(KVCache.INT8_PER_TOKEN_HEAD, [CPU]))


@pytest.mark.gpu
def test_the_kernels_of_this_gpu_are_right_and_a_wrong_one_is_found(monkeypatch):
    from flashrl_verl.attention import kernels as attention

    register()
    place = torch.device("cuda", 0)
    found = [*kernels.check_attention(KVCache.INT8_PER_TOKEN_HEAD, [place])]
    for precision in Precision:
        found += kernels.check_precision(precision, [place])
    assert {finding.level for finding in found} == {"ok"}, found
    write = attention.write

    def wrongly(key, value, pages, slots):
        write(key, value, pages, slots)
        pages.value_scales[:, 1].mul_(1.02)

    monkeypatch.setattr(attention, "write", wrongly)
    assert only(kernels.check_attention(KVCache.INT8_PER_TOKEN_HEAD, [place])).level == "error"


# ---- nodes ----


def test_all_differences_between_nodes_are_one_error_that_says_who_has_what():
    same = {"Python": "3.12.3", "vllm": "0.24.0"}
    assert cluster.compare({"driver": same, "n1": same, "n2": same}).level == "ok"
    found = cluster.compare({"driver": same, "n1": {**same, "vllm": "0.27.1"}, "n2": same})
    assert (found.level, found.text) == ("error", "vllm is 0.24.0 on driver, n2 but 0.27.1 on n1")


def test_a_change_of_this_packages_code_is_a_change_of_its_version(tmp_path, monkeypatch):
    before = machine.facts()
    copy = shutil.copytree(flashrl_verl.__path__[0], tmp_path / "flashrl_verl")
    monkeypatch.setattr(flashrl_verl, "__file__", str(copy / "__init__.py"))
    assert machine.facts() == before
    (copy / "configs" / "precision" / "int8.yaml").open("a").write("\n")
    assert machine.facts()[DISTRIBUTION] != before[DISTRIBUTION]
