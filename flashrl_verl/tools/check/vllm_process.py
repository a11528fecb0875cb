# SPDX-License-Identifier: Apache-2.0
"""In a fresh process: vLLM loads our plugin as it does in each of its own, finds a device, and a layer computes
right."""

from __future__ import annotations

from collections.abc import Iterator

from flashrl_verl.errors import ConfigError
from flashrl_verl.plugins.versions import vllm_device
from flashrl_verl.tools.check import subjects
from flashrl_verl.tools.check.devices import cuda_gpus, driver_cuda, nvidia_devices, torch_cuda
from flashrl_verl.tools.check.findings import Finding, Verdict, guarded, ok, skipped
from flashrl_verl.tools.check.metadata import PLUGIN
from flashrl_verl.tools.check.plugins import check_loaded
from flashrl_verl.tools.check.settings import CheckSettings
from flashrl_verl.tools.check.subjects import VLLM_PLUGIN


def run(settings: CheckSettings, ranks: bool = True) -> Iterator[Finding | tuple[str, str]]:
    """What the child finds; nothing of vLLM may be imported before it.

    Args:
        settings: what to look for.
        ranks: whether ranks of a run come here at all. Without them (a cluster's head) a missing GPU hurts nobody.
    """
    loaded = list(guarded(VLLM_PLUGIN, check_plugin))
    yield from loaded
    if not ranks:
        of_ranks = [name for name in subjects.of_vllm_process(settings) if name != VLLM_PLUGIN]
        yield from (
            skipped(subject, "this node offers no GPU to Ray, so no rank of a run comes here") for subject in of_ranks
        )
        yield ("GPUs", "none")
        return
    from flashrl_verl.tools.check import (
        attention,  # they import vLLM's ops
        experts,
        gpu,
        numerics,
    )

    yield from guarded(subjects.DRIVER, gpu.check_driver, nvidia_devices(), driver_cuda(), torch_cuda())
    try:
        device = vllm_device()
        gpus = cuda_gpus() if device == "cuda" else []
    except (ConfigError, RuntimeError) as error:
        yield gpu.no_device(error)
        before = (VLLM_PLUGIN, subjects.DRIVER, subjects.DEVICE)
        later = [name for name in subjects.of_vllm_process(settings) if name not in before]
        yield from (skipped(subject, "there is no device") for subject in later)
        return
    yield from guarded(subjects.DEVICE, gpu.check_device, device, gpus)
    yield ("GPUs", ", ".join(sorted(g.name for g in gpus)) or "none")
    yield from guarded(subjects.ROW_KERNEL, gpu.check_row_kernel, settings.precisions, gpus)
    for precision in settings.precisions:
        kernels = list(
            guarded(subjects.kernel(precision), gpu.check_kernel, precision, device, [g.capability for g in gpus])
        )
        yield from kernels
        computed = subjects.of_precision(precision)[1:]
        # They import what the plugin was to register: after a failure above they would say nothing of a run.
        if any(finding.verdict is Verdict.FAIL for finding in (*loaded, *kernels)):
            yield from (
                skipped(subject, "without plugin and kernel there is no layer to look at") for subject in computed
            )
            continue
        yield from guarded(subjects.numerics(precision), numerics.check_layer, precision, device, len(gpus))
        if subjects.experts(precision) in computed:
            yield from guarded(subjects.experts(precision), experts.check_experts, precision, device, len(gpus))
    yield from guarded(subjects.ATTENTION, attention.check_attention, gpus)


def check_plugin() -> Iterator[Finding]:
    """``vllm.general_plugins`` are loaded by vLLM's own function, and ours has registered its quantization."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.plugins import load_general_plugins

    error = None
    try:
        load_general_plugins()
    except Exception as raised:  # noqa: BLE001 - vLLM guards the import of a plugin, not its call
        error = raised
    registered = PLUGIN in QUANTIZATION_METHODS
    wrong = list(
        check_loaded(VLLM_PLUGIN, "vllm.general_plugins", "VLLM_PLUGINS", None, registered, lambda p: p.load()())
    )
    yield from wrong
    if error is not None and not wrong:  # another package's
        raise error
    if not wrong:
        yield ok(VLLM_PLUGIN, f"loaded by vLLM in a fresh process: quantization={PLUGIN}")
