# SPDX-License-Identifier: Apache-2.0
"""Load one weight update into a vLLM model and account for every tensor of it.

The first update after the engine starts is careful (``first_load.py``). What it records is the baseline; a later update must
bring exactly the same names and shapes, and is carried out by the load plan.
"""

import time
from collections.abc import Callable

import torch
from verl.workers.rollout.vllm_rollout.weight_update_utils import apply_buffer_updates

from flashrl_verl.errors import RefitError
from flashrl_verl.quantization.parameter import QuantizedStorage, observe_loads
from flashrl_verl.rollout.bucket_program import BucketPrograms
from flashrl_verl.rollout.first_load import FirstLoad, first_line
from flashrl_verl.rollout.kv_scales import KVScales
from flashrl_verl.rollout.phase_clock import PhaseClock
from flashrl_verl.rollout.plan import LoadPlan, NamedTensors
from flashrl_verl.rollout.poison import deaf_layers, poison
from flashrl_verl.rollout.receipt import Manifest
from flashrl_verl.rollout.recorder import LoadRecorder
from flashrl_verl.rollout.storage_check import CodeChangeMeter, StorageCheck

_LISTED = 20
"""Names an error lists before it only counts."""


class WeightRefit:
    """Owns the account of one model across updates. Not thread-safe: vLLM's worker calls it from one thread."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.baseline: dict[str, tuple[int, ...]] | None = None
        """HF name -> shape of every tensor of a whole update; None until the first one has succeeded."""
        self.last_receipt: dict = {}
        self._device = next(model.parameters()).device
        self._flag = torch.zeros(1, dtype=torch.int32, device=self._device)
        """Set by the kernels when a tensor they quantize or copy holds NaN or Inf; read once an update."""
        self.kv_scales = KVScales(model)
        self._first: FirstLoad | None = None
        self._meter: CodeChangeMeter | None = None
        self._previous: Manifest | None = None
        # Where every parameter hangs: walking vLLM's modules takes longer than loading them.
        self._slots = [
            (f"{prefix}.{key}" if prefix else key, module, key)
            for prefix, module in model.named_modules()
            for key in module._parameters
        ]
        self.addresses = self._current_addresses()
        """Where each parameter has been since the engine started and captured its CUDA graphs: no update may move one."""

    def begin(self, step: int, stride: int) -> None:
        """Start an update: clear the account, and poison the storage if the update is to be careful."""
        self.manifest = Manifest(step=step, stride=stride)
        self._problems: list[str] = []
        self._storage = StorageCheck(step)
        self._clock = PhaseClock(self._device)
        self._flag.zero_()
        self.last_receipt = {}
        if self.baseline is None:
            self._quantized = {n: p for n, p in self._current_parameters().items() if isinstance(p, QuantizedStorage)}
            self._plan = LoadPlan()
            self._recorder = LoadRecorder(self._plan, self._flag, self._on_load)
            self._first = FirstLoad(self.model, self._plan, self._recorder)
            self._programs = BucketPrograms(self._plan)
            self._buffers = dict(self.model.named_buffers())
        for weight in self._quantized.values():
            weight.reset_account()

    def poison(self, process_weights: Callable[[], None]) -> list[str]:
        """Overwrite all weights, and what is derived from them: only an update that writes them all makes sense of them again.

        Returns:
            Names of layers that compute with something that does not follow their weights (``deaf_layers``).
        """
        parameters = self._current_parameters()
        deaf = deaf_layers(self.model, parameters, process_weights)
        poison(parameters)
        process_weights()
        self.kv_scales.poison()
        return deaf

    def load(self, weights: NamedTensors) -> None:
        """Load one bucket. Problems are collected, not raised: the sender must be able to finish.

        Args:
            weights: (Hugging Face name, tensor) pairs; the tensors are not kept past this call.
        """
        if not weights:
            return
        try:
            with self._clock:
                if self.baseline is None:
                    self._load_carefully(weights)
                else:
                    self._load_as_planned(weights)
        finally:
            self._recorder.release()

    def finish(self, process_weights: Callable[[], None]) -> dict:
        """End the update: let vLLM post-process, verify, and return the report.

        Args:
            process_weights: vLLM's ``process_weights_after_loading`` for this model (``PostProcess``).

        Returns:
            Plain data: receipt, seconds (``load``: the loading itself; ``finish``: post-processing and verification), tensors
            updated, quantized and left alone, and the share of sampled codes that changed (None at first).

        Raises:
            RefitError: one error that lists everything unaccounted for; the engine's weights are then unusable.
        """
        self._check_names()
        if not self._problems:
            process_weights()
            self.kv_scales.follow_weights()
            self._check_places()
        if self._meter is None:
            self._meter = CodeChangeMeter(list(self._quantized.values()))
        if not self._problems:  # all of it is enqueued before the host waits for any
            self._storage.compare()
        changed = self._meter.measure()
        self.manifest.complete()
        load_seconds = self._clock.seconds()
        started = time.perf_counter()
        self._check_finite()
        if self._first is not None and not self._problems:
            self._report("parameters the update left (partly) unwritten", self._first.holes())
        if not self._problems:
            self._report("parameters that are not copies of the tensors that arrived", self._storage.stale_copies())
            self._report("the stored codes are not those of the tensors that arrived", self._storage.wrong_codes())
            self._report("layers whose weights give no finite scale of the KV cache", self.kv_scales.settle())
        if self._problems:
            raise RefitError(
                f"weight update of step {self.manifest.step}: {'; '.join(self._problems)}. Nothing was sampled from it; resume "
                "from the last checkpoint. Should the same appear with flashrl.precision=bf16, the model or vLLM's version "
                "(`flashrl version`) is not supported; a layer that only 8 bits do not suit goes into flashrl.ignore"
            )
        self._accept()
        return {
            "receipt": self.last_receipt,
            "seconds": {"load": load_seconds, "finish": time.perf_counter() - started},
            "updated": len(self.manifest.shapes) - len(self._left_alone),
            "quantized": len(self._recorder.written),
            "left_alone": list(self._left_alone),
            "code_change_rate": None if changed is None else float(changed),
        }

    def _accept(self) -> None:
        """The update is whole: it is the baseline if it is the first, and the one to compare with."""
        if self._first is not None:
            self._recorder.close()
            self._written, self._left_alone, self._first = self._first.written, self._first.left_alone, None
        self._programs.end_update()
        # Equal to the old one, but made of the objects that the next update brings: equality is then soon found.
        self.baseline = self.manifest.shapes
        self.last_receipt = self.manifest.receipt(self._previous)
        self._previous = self.manifest
        self._previous.drop_tensors()

    def _current_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Name -> parameter as it hangs in its module now; a replaced one shows, whoever replaced it."""
        return {name: module._parameters[key] for name, module, key in self._slots if module._parameters.get(key) is not None}

    def _current_addresses(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self._current_parameters().items()}

    def _on_load(self, name: str, weight: QuantizedStorage, source: torch.Tensor, first_row: int, first_column: int) -> None:
        if self.manifest.samples(name):
            self._storage.expect_codes(name, weight, source, first_row, first_column)

    def _are_contiguous(self, weights: NamedTensors) -> bool:
        """Bucket tensors are; kernels count rows from their addresses, and would read others wrongly."""
        scattered = [n for n, t in weights if not t.is_contiguous()]
        self._report("tensors that are not contiguous, as a sender has to make them", scattered)
        return not scattered

    def _load_carefully(self, weights: NamedTensors) -> None:
        if not self._are_contiguous(weights):
            return
        for name, tensor in weights:
            self.manifest.add(name, tensor)
        self._first.load(weights)
        for name, tensor in weights:
            self._expect_copy(name, tensor)
        self.manifest.check_finite([(n, t) for n, t in weights if not self._plan.quantizes(n)])

    def _load_as_planned(self, weights: NamedTensors) -> None:
        """Load a bucket by the record of the first update."""
        program = self._programs.find(weights)
        if program is None:
            weights = self._known(weights) if self._are_contiguous(weights) else []
            if not weights:
                return
            program = self._programs.make(weights)
        program.run(weights, self._flag)
        # The GPU is at work: the rest of the host's part hides behind it.
        self.manifest.add_passed(program.passed)
        for i in program.passed.sampled(self.manifest.step, self.manifest.stride):
            self._sample(*weights[i])
        self._load_by_vllm([weights[i] for i in program.unplanned])

    def _known(self, weights: NamedTensors) -> NamedTensors:
        """The tensors that the baseline has in these shapes; the others are ``_check_names``'s."""
        known = []
        for name, tensor in weights:
            if self.baseline.get(name) == tensor.shape:
                known.append((name, tensor))
            else:
                self.manifest.add(name, tensor)
        return known

    def _sample(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor's checksum, and note what it must have become."""
        self.manifest.add_sum(name, tensor)
        if self._plan.quantizes(name):
            for shard in self._plan.shards(name):
                self._storage.expect_codes(name, shard.weight, shard.source(tensor), shard.first_row, shard.first_column)
        self._expect_copy(name, tensor)

    def _load_by_vllm(self, weights: NamedTensors) -> None:
        """Load tensors through the model's own loaders, or buffers in place, and check that each was taken."""
        if not weights:
            return
        buffers = [(n, t) for n, t in weights if n in self._buffers]
        others = [(n, t) for n, t in weights if n not in self._buffers]
        loaded = {n for n, _ in buffers}
        try:
            if buffers:
                apply_buffer_updates(self.model, buffers, self._buffers)
            with observe_loads(self._recorder):
                loaded |= set(self.model.load_weights(self._recorder.watch(others)) or ()) if others else set()
        except Exception as error:  # noqa: BLE001
            self._problems.append(f"loading a bucket failed ({_list([n for n, _ in weights])}): {first_line(error)}")
            return
        self._report("the model did not load", [n for n, _ in weights if not self._written[n] <= loaded])
        self.manifest.check_finite(weights)

    def _expect_copy(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._plan.copies and self.manifest.samples(name):
            self._storage.expect_copy(name, tensor, self._plan.copies[name])

    def _report(self, text: str, names: list[str]) -> None:
        if names:
            self._problems.append(f"{text}: {_list(names)}")

    def _check_names(self) -> None:
        """Every tensor of the baseline, no other, each exactly once."""
        seen, baseline = self.manifest.shapes, self.baseline
        self._report("tensors that arrived more than once", self.manifest.repeated)
        if self._first is not None:
            self._problems += self._first.problems
            self._report("unexpected tensors that no parameter takes", self._first.unexpected)
        elif seen != baseline:
            self._report("missing tensors", [n for n in baseline if n not in seen])
            self._report("unexpected tensors", [n for n in seen if n not in baseline])
            wrong = [n for n, shape in baseline.items() if seen.get(n, shape) != shape]
            self._report("wrongly shaped tensors", [f"{n} {seen[n]} instead of {baseline[n]}" for n in wrong])
        partial = [
            f"{n} ({w.loaded_elements} of {w.numel()} elements)"
            for n, w in self._quantized.items()
            if w.loaded_elements != w.numel()
        ]
        self._report("quantized weights that were not written exactly once", partial)

    def _check_finite(self) -> None:
        bad = self._non_finite_planned() + self.manifest.non_finite()
        if bad:
            self._problems.append(
                f"NaN or Inf in {_list(list(dict.fromkeys(bad)))}: resume from a checkpoint before it with a lower "
                "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.optim.clip_grad"
            )

    def _non_finite_planned(self) -> list[str]:
        """Names of planned tensors with NaN or Inf, from what they left in the storage; looked for when the flag is up."""
        if not self._flag.item():
            return []
        plan, named = self._plan, []
        for name in self.manifest.shapes:
            stored = [shard.stored()[1] for shard in plan.shards(name)] if plan.quantizes(name) else []
            stored += [plan.copies[name].destination()] if name in plan.copies else []
            if not all(part.isfinite().all() for part in stored):
                named.append(name)
        if named:
            return named
        # The model transformed a tensor before it loaded it: the storage knows which layer.
        return [f"what became {n}" for n, w in self._quantized.items() if not w.scales.data.isfinite().all()] or ["an update"]

    def _check_places(self) -> None:
        moved = [n for n, address in self._current_addresses().items() if self.addresses.get(n, address) != address]
        self._report("parameters that moved, which CUDA graphs would not see", moved)


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
