# SPDX-License-Identifier: Apache-2.0
"""Faults for end-to-end tests, loaded by verl through VERL_USE_EXTERNAL_MODULES in every process of a run.

FLASHRL_TEST_FAULT is ``<kind>:<step>``. Each fault replaces a method of this package's own classes; verl and vLLM are
left as they are.
"""

import os
import random
import signal
from types import SimpleNamespace

import torch
from wrapt import register_post_import_hook

KIND, STEP = os.environ["FLASHRL_TEST_FAULT"].split(":")
STEP = int(STEP)
FIRED = os.environ["FLASHRL_TEST_FIRED"]
"""File that is touched when the fault strikes, so that a test can tell how long the run survived it."""
TENSOR = "model.layers.0.mlp.down_proj.weight"


def fired() -> None:
    with open(FIRED, "a"):
        pass


def skip_update(adapter) -> None:
    """The trainer's adapter forgets one update altogether."""
    update_weights = adapter.FlashRLServerAdapter.update_weights

    async def forgetful(self, weights, global_steps=None, **kwargs):
        if global_steps == STEP:
            fired()
        else:
            await update_weights(self, weights, global_steps=global_steps, **kwargs)

    adapter.FlashRLServerAdapter.update_weights = forgetful


def stale_tensor(refit, ranks=(0, 1)) -> None:
    """The engine's ``ranks`` get one tensor of the update before."""
    from vllm.distributed import get_tensor_model_parallel_rank

    load = refit.WeightRefit.load
    kept: dict[str, torch.Tensor] = {}

    def stale(self, weights):
        step = self._manifest.step
        fresh = {n: t.clone() for n, t in weights if n == TENSOR}
        load(
            self,
            [
                (n, kept[n] if n == TENSOR and step == STEP and get_tensor_model_parallel_rank() in ranks else t)
                for n, t in weights
            ],
        )
        kept.update(fresh)

    refit.WeightRefit.load = stale


def stale_tensor_on_rank_1(refit) -> None:
    stale_tensor(refit, ranks=(1,))


def raise_in_receiver(refit) -> None:
    load = refit.WeightRefit._load

    def raising(self, weights):
        if self._manifest.step == STEP:
            fired()
            raise OSError("a fault inside the receiver")
        load(self, weights)

    refit.WeightRefit._load = raising


def kill_engine(refit) -> None:
    load = refit.WeightRefit.load

    def killing(self, weights):
        if self._manifest.step == STEP:
            fired()
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
            fired()

    method = linear.QuantizedLinearMethod
    method.process_weights_after_loading = pack
    apply = method.apply
    method.apply = lambda self, layer, x, bias=None: apply(self, getattr(layer, "packed", layer), x, bias)


def nan_update(worker) -> None:
    """The optimizer step leaves a NaN in one weight of the actor."""
    update_actor = worker.FlashRLWorker.update_actor
    calls = []

    def poisoned(self, data):
        output = update_actor(self, data)
        calls.append(1)
        if len(calls) == STEP:
            parameter = dict(self.actor.engine.module.named_parameters())[TENSOR]
            with torch.no_grad():
                parameter.data.to_local().view(-1)[3] = float("nan")
        return output

    poisoned.__dict__.update(update_actor.__dict__)  # verl's dispatch attributes
    worker.FlashRLWorker.update_actor = poisoned


def noisy_log_probs(server) -> None:
    """From step STEP on, the rollout reports log-probs that are not those it sampled with: normal noise, deviation
    1."""
    if not hasattr(server, "FlashRLReplica"):
        # the engine's own process, in the middle of importing it; what follows is for the one that starts engines
        return
    import ray

    noise = random.Random(0)

    class NoisyServer(server.FlashRLHttpServer):
        async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
            greedy = sampling_params.get("temperature") == 0  # validation and the self-check
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
            if not greedy and self.global_steps >= STEP - 1:  # a step samples from the weights of the one before
                fired()
                output.log_probs = [value + noise.gauss(0.0, 1.0) for value in output.log_probs]
            return output

    start = server.FlashRLReplica.__init__

    def noisy_start(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self.server_class = ray.remote(NoisyServer)

    server.FlashRLReplica.__init__ = noisy_start


MODULES = {
    "skip_update": ("flashrl_verl.refit.sender", skip_update),
    "stale_tensor": ("flashrl_verl.refit.load", stale_tensor),
    "stale_tensor_on_rank_1": ("flashrl_verl.refit.load", stale_tensor_on_rank_1),
    "raise_in_receiver": ("flashrl_verl.refit.load", raise_in_receiver),
    "kill_engine": ("flashrl_verl.refit.load", kill_engine),
    "stale_kernel": ("flashrl_verl.quantization.linear", stale_kernel),
    "noisy_log_probs": ("flashrl_verl.rollout.server", noisy_log_probs),
    "nan_update": ("flashrl_verl.trainer.worker", nan_update),
}
module, fault = MODULES[KIND]
register_post_import_hook(fault, module)
