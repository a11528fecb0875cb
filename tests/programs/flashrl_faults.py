# SPDX-License-Identifier: Apache-2.0
"""Faults for end-to-end tests, loaded by verl through VERL_USE_EXTERNAL_MODULES in every process of a run.

FLASHRL_TEST_FAULT is ``<kind>:<step>``. Each fault replaces a method of this package's own classes; verl and vLLM are
left as they are.
"""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import torch
from wrapt import register_post_import_hook

KIND, STEP = os.environ["FLASHRL_TEST_FAULT"].split(":")
STEP = int(STEP)
FIRED = Path(os.environ["FLASHRL_TEST_FIRED"])
"""File that is touched when the fault strikes, so that a test can tell how long the run survived it."""
TENSOR = "model.layers.0.mlp.down_proj.weight"


def skip_update(adapter) -> None:
    """The trainer's adapter forgets one update altogether."""
    update_weights = adapter.FlashRLServerAdapter.update_weights

    async def forgetful(self, weights, global_steps=None, **kwargs):
        if global_steps == STEP:
            FIRED.touch()
        else:
            await update_weights(self, weights, global_steps=global_steps, **kwargs)

    adapter.FlashRLServerAdapter.update_weights = forgetful


def stale_tensor_on_rank_1(refit) -> None:
    """The engine's second rank gets one tensor of the update before."""
    from vllm.distributed import get_tensor_model_parallel_rank

    load = refit.WeightRefit.load
    kept: dict[str, torch.Tensor] = {}

    def stale(self, weights):
        late = self._manifest.step == STEP and get_tensor_model_parallel_rank() == 1
        fresh = {n: t.clone() for n, t in weights if n == TENSOR}
        load(self, [(n, kept[n] if late and n == TENSOR else t) for n, t in weights])
        kept.update(fresh)

    refit.WeightRefit.load = stale


def raise_in_receiver(refit) -> None:
    load = refit.WeightRefit._load

    def raising(self, weights):
        if self._manifest.step == STEP:
            FIRED.touch()
            raise OSError("a fault inside the receiver")
        load(self, weights)

    refit.WeightRefit._load = raising


def kill_engine(refit) -> None:
    load = refit.WeightRefit.load

    def killing(self, weights):
        if self._manifest.step == STEP:
            FIRED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        load(self, weights)

    refit.WeightRefit.load = killing


def stale_kernel(linear) -> None:
    """Linear layers compute with a packed copy that stops following the codes: right storage, wrong products."""

    def pack(self, layer):
        # The dummy weights vLLM starts from, the first update, the self-check's poison; STEP is how many of them are
        # taken.
        layer.flashrl_calls = getattr(layer, "flashrl_calls", 0) + 1
        if layer.flashrl_calls <= STEP:
            layer.packed = SimpleNamespace(weight=layer.weight.data.clone(), weight_scale=layer.weight_scale.data)
        else:
            FIRED.touch()

    method = linear.QuantizedLinearMethod
    method.process_weights_after_loading = pack
    apply = method.apply
    method.apply = lambda self, layer, x, bias=None: apply(self, getattr(layer, "packed", layer), x, bias)


def mismatch(guard) -> None:
    """From step STEP on the guard is told of a rollout that is far from the trainer."""
    check = guard.Guard.check

    def told(self, step, metrics, **more):
        if step >= STEP:
            metrics = {**metrics, "rollout_corr/k3_kl": 1.0}
        check(self, step, metrics, **more)

    guard.Guard.check = told


MODULES = {
    "skip_update": ("flashrl_verl.refit.sender", skip_update),
    "stale_tensor_on_rank_1": ("flashrl_verl.refit.load", stale_tensor_on_rank_1),
    "raise_in_receiver": ("flashrl_verl.refit.load", raise_in_receiver),
    "kill_engine": ("flashrl_verl.refit.load", kill_engine),
    "stale_kernel": ("flashrl_verl.quantization.linear", stale_kernel),
    "mismatch": ("flashrl_verl.trainer.guard", mismatch),
}
module, fault = MODULES[KIND]
register_post_import_hook(fault, module)
