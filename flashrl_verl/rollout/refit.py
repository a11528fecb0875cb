# SPDX-License-Identifier: Apache-2.0
"""Load one weight update into a vLLM model and account for every tensor of it.

The first update after the engine starts is careful: all storage is poisoned first (unwritten codes, NaN scales, NaN BF16), what
each tensor writes is recorded, and nothing may stay poisoned. That record is the baseline; a later update must bring exactly
the same names and shapes.
"""

import time
from collections.abc import Callable

import torch
from verl.workers.rollout.vllm_rollout.weight_update_utils import apply_buffer_updates

from flashrl_verl.errors import RefitError
from flashrl_verl.quantization.parameter import QuantizedStorage, observe_loads
from flashrl_verl.rollout.phase_clock import PhaseClock
from flashrl_verl.rollout.plan import Copy, LoadPlan, NamedTensors, Shard, find_copy
from flashrl_verl.rollout.receipt import Manifest, to_host
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
        self.written: dict[str, set[str]] = {}
        """HF name -> the vLLM parameters it writes, as seen in the first update."""
        self.addresses: dict[str, int] = {}
        """Where each parameter lies: CUDA graphs replay these addresses, so no update may move one."""
        self.left_alone: list[str] = []
        """HF names the model ignores on purpose (a tied ``lm_head``, rotary inverse frequencies)."""
        self.last_receipt: dict = {}
        self._device = next(model.parameters()).device
        self._flag = torch.zeros(1, dtype=torch.int32, device=self._device)
        """Set by the row kernel when a quantized tensor holds NaN or Inf; read once an update."""
        self._plan = LoadPlan()
        self._recorder = LoadRecorder(self._plan, self._flag, self._on_load)
        self._meter: CodeChangeMeter | None = None
        self._previous: Manifest | None = None
        # Where every parameter hangs: walking vLLM's modules takes longer than loading them.
        self._slots = [
            (f"{prefix}.{key}" if prefix else key, module, key)
            for prefix, module in model.named_modules()
            for key in module._parameters
        ]

    def begin(self, step: int, stride: int) -> None:
        """Start an update: clear the account, and poison the storage if the update is to be careful."""
        self.manifest = Manifest(step=step, stride=stride)
        self._problems: list[str] = []
        self._unexpected: list[str] = []
        self._parameters = self._current_parameters()
        self._quantized = {n: p for n, p in self._parameters.items() if isinstance(p, QuantizedStorage)}
        self._storage = StorageCheck(step)
        self._clock = PhaseClock(self._device)
        self._flag.zero_()
        self.last_receipt = {}
        for weight in self._quantized.values():
            weight.reset_account()
        if self.baseline is None:
            self.written, self.left_alone = {}, []
            self._plan = LoadPlan()
            self._recorder = LoadRecorder(self._plan, self._flag, self._on_load)
            self._vllm_names = {id(p): n for n, p in self._quantized.items()}
            self._buffers = dict(self.model.named_buffers())
            self._poison()

    def load(self, weights: NamedTensors) -> None:
        """Load one bucket. Problems are collected, not raised: the sender must be able to finish.

        Args:
            weights: (Hugging Face name, tensor) pairs; the tensors are not kept past this call.
        """
        try:
            with self._clock:
                for name, tensor in weights:
                    self.manifest.add(name, tensor)
                if self.baseline is None:
                    self._load_carefully(weights)
                else:
                    self._load_as_planned(weights)
                # The row kernel looks at what the plan quantizes.
                self.manifest.check_finite([(n, t) for n, t in weights if not self._plan.quantizes(n)])
        finally:
            self._recorder.release()

    def finish(self, process_weights: Callable[[], None]) -> dict:
        """End the update: let vLLM post-process, verify, and return the report.

        Args:
            process_weights: vLLM's ``process_weights_after_loading`` for this model (``PostProcess``).

        Returns:
            Plain data: receipt, seconds (``load``: the loading itself; ``finish``: post-processing and verification), tensors
            updated, quantized and left alone, and the share of sampled codes that changed (None at the first update).

        Raises:
            RefitError: one error that lists everything unaccounted for; the engine's weights are then unusable.
        """
        self._check_names()
        if not self._problems:
            process_weights()
            self._check_places()
        load_seconds = self._clock.seconds()  # the host waits for the device here, and has nothing left to do by itself
        started = time.perf_counter()
        self._check_finite()
        if self.baseline is None and not self._problems:
            self._check_holes()
        if not self._problems:
            self._check_storage()
        if self._problems:
            raise RefitError(f"weight update of step {self.manifest.step}: " + "; ".join(self._problems))
        if self.baseline is None:
            self.baseline = dict(self.manifest.shapes)
            self._recorder.close()
        if not self.addresses:
            self.addresses = self._current_addresses()
            self._meter = CodeChangeMeter(list(self._quantized.values()))
        changed = self._meter.measure()
        self.last_receipt = self.manifest.receipt(self._previous)
        self._previous = self.manifest
        self._previous.drop_tensors()
        return {
            "receipt": self.last_receipt,
            "seconds": {"load": load_seconds, "finish": time.perf_counter() - started},
            "updated": len(self.manifest.shapes) - len(self.left_alone),
            "quantized": len(self._recorder.written),
            "left_alone": list(self.left_alone),
            "code_change_rate": changed,
        }

    def _current_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Name -> parameter as it hangs in its module now; a replaced one shows, whoever replaced it."""
        return {name: module._parameters[key] for name, module, key in self._slots if module._parameters.get(key) is not None}

    def _current_addresses(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self._parameters.items()}

    def _poison(self) -> None:
        for parameter in self._parameters.values():
            if isinstance(parameter, QuantizedStorage):
                parameter.poison()
            elif parameter.is_floating_point() and parameter.dtype.itemsize > 1:
                parameter.data.fill_(float("nan"))

    def _on_load(self, name: str, weight: QuantizedStorage, source: torch.Tensor, first_row: int, first_column: int) -> None:
        if self.manifest.samples(name):
            self._storage.expect_codes(name, weight, source, first_row, first_column)

    def _on_shard(self, name: str, shard: Shard, tensor: torch.Tensor) -> None:
        if self.manifest.samples(name):
            rows = tensor.narrow(0, shard.source_row, shard.rows)
            self._storage.expect_codes(name, shard.weight, rows, shard.first_row, shard.first_column)

    def _load_carefully(self, weights: NamedTensors) -> None:
        """Load a bucket at once, then everything that was not quantized alone: what it wrote, if anything, is the record."""
        plain = [(name, tensor) for name, tensor in weights if name not in self._buffers]
        try:
            with observe_loads(self._recorder):
                self.model.load_weights(self._recorder.watch(plain))
        except Exception:  # noqa: BLE001 - one by one, the tensor at fault has a name
            self._recorder.take_back({name for name, _ in plain})
        for name, tensor in weights:
            if name in self._recorder.written:
                self.written[name] = {self._vllm_names[id(weight)] for weight in self._recorder.written[name]}
            else:
                self._load_alone(name, tensor)

    def _load_alone(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor and classify it: it wrote parameters, it is ignored on purpose, or it is unexpected."""
        try:
            if name in self._buffers:
                apply_buffer_updates(self.model, [(name, tensor)], self._buffers)
                loaded = {name}
            else:
                with observe_loads(self._recorder):
                    loaded = set(self.model.load_weights(self._recorder.watch([(name, tensor)])) or ())
        except Exception as error:  # noqa: BLE001 - models raise anything; the name is what the user needs
            self._problems.append(f"{name} {tuple(tensor.shape)} does not fit: {_first_line(error)}")
            return
        self.written[name] = loaded
        if loaded:
            if len(loaded) == 1 and name not in self._buffers:
                self._plan_copy(name, tensor, next(iter(loaded)))
                self._expect_copy(name, tensor)
            return
        if name.endswith("rotary_emb.inv_freq") or (name.startswith("lm_head.") and self._tied()):
            self.left_alone.append(name)
        else:
            self._unexpected.append(name)

    def _plan_copy(self, name: str, tensor: torch.Tensor, target: str) -> None:
        """Put ``tensor`` into the plan if the model makes rows of ``target`` a plain copy of rows of it."""
        parameter = self._parameters.get(target)
        if parameter is None or isinstance(parameter, QuantizedStorage) or not tensor.dim() or not tensor.is_floating_point():
            return
        copy = Copy(parameter, 0, tensor.shape[0], 0) if parameter.shape == tensor.shape else None
        # Equal shapes alone prove nothing: with tensor parallelism 2, gate's and up's rows of a rank together are as many as
        # gate has, and a bias that is still zero would look like a copy too.
        if copy is None or not _holds(copy, tensor) or bool((tensor == tensor.flatten()[0]).all()):
            copy = find_copy(parameter, tensor, lambda probe: self.model.load_weights([(name, probe)]))
        if copy is not None and _holds(copy, tensor):
            self._plan.copies[name] = copy

    def _load_as_planned(self, weights: NamedTensors) -> None:
        """Load a bucket by the record of the first update; tensors of other names or shapes are ``_check_names``'s."""
        known = [(n, t) for n, t in weights if self.baseline.get(n) == tuple(t.shape)]
        plan = self._plan
        # Bucket tensors are contiguous; the plan counts rows from their addresses, and would read others wrongly.
        scattered = [n for n, t in known if not t.is_contiguous()]
        if scattered:
            self._problems.append("tensors that are not contiguous: " + _list(scattered))
            return
        plan.run([(n, t) for n, t in known if plan.quantizes(n)], self._flag, self._on_shard)
        copied = [(n, t) for n, t in known if n in plan.copies]
        plan.run_copies(copied)
        for name, tensor in copied:
            self._expect_copy(name, tensor)
        self._load_by_vllm([(n, t) for n, t in known if not plan.quantizes(n) and n not in plan.copies])

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
            self._problems.append(f"loading a bucket failed ({_list([n for n, _ in weights])}): {_first_line(error)}")
            return
        skipped = [n for n, _ in weights if not self.written[n] <= loaded]
        if skipped:
            self._problems.append("the model did not load " + _list(skipped))

    def _expect_copy(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._plan.copies and self.manifest.samples(name):
            self._storage.expect_copy(name, tensor, self._plan.copies[name])

    def _check_names(self) -> None:
        """Every tensor of the baseline, no other, each exactly once."""
        seen = self.manifest.shapes
        if self._unexpected:
            self._problems.append("unexpected tensors that no parameter takes: " + _list(self._unexpected))
        if self.baseline is not None:
            missing = [n for n in self.baseline if n not in seen]
            extra = [n for n in seen if n not in self.baseline]
            wrong = [
                f"{n} {seen[n]} instead of {shape}" for n, shape in self.baseline.items() if n in seen and seen[n] != shape
            ]
            for text, names in (("missing", missing), ("unexpected", extra), ("wrongly shaped", wrong)):
                if names:
                    self._problems.append(f"{text} tensors: {_list(names)}")
        partial = [
            f"{n} ({w.loaded_elements} of {w.numel()} elements)"
            for n, w in self._quantized.items()
            if w.loaded_elements != w.numel()
        ]
        if partial:
            self._problems.append("quantized weights that were not written exactly once: " + _list(partial))

    def _check_finite(self) -> None:
        bad = self._non_finite_quantized() + self.manifest.non_finite()
        if bad:
            self._problems.append(
                f"NaN or Inf in {_list(bad)}: resume from a checkpoint before it with a lower "
                "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.optim.clip_grad"
            )

    def _non_finite_quantized(self) -> list[str]:
        """Names of quantized tensors with NaN or Inf, from the scales they left; looked for only when the flag is up."""
        if not self._flag.item():
            return []
        planned = [name for name in self.manifest.shapes if self._plan.quantizes(name)]
        named = [name for name in planned if not all(s.scales().isfinite().all() for s in self._plan.shards(name))]
        if named:
            return named
        # The model transformed a tensor before it loaded it: the storage knows which layer.
        return [f"what became {n}" for n, w in self._quantized.items() if not w.scales.data.isfinite().all()] or ["an update"]

    def _check_holes(self) -> None:
        names, flags = [], []
        for name, parameter in self._parameters.items():
            if isinstance(parameter, QuantizedStorage):
                names.append(name)
                flags.append(parameter.unwritten())
            elif parameter.is_floating_point() and parameter.numel() and parameter.dtype.itemsize > 1:
                names.append(name)
                flags.append(torch.stack(parameter.data.aminmax()).isnan().any())
        holes = [n for n, hole in zip(names, to_host(flags), strict=True) if hole]
        if holes:
            self._problems.append("parameters the update left (partly) unwritten: " + _list(holes))

    def _check_places(self) -> None:
        self._parameters = self._current_parameters()
        moved = [n for n, address in self._current_addresses().items() if self.addresses.get(n, address) != address]
        if moved:
            self._problems.append("parameters that moved, which CUDA graphs would not see: " + _list(moved))

    def _check_storage(self) -> None:
        """The storage must hold what ``numerics`` gives for sampled rows, or a copy of what arrived."""
        for text, names in (
            ("parameters that are not copies of the tensors that arrived", self._storage.stale_copies()),
            ("the stored codes are not those of the tensors that arrived", self._storage.wrong_codes()),
        ):
            if names:
                self._problems.append(f"{text}: {_list(names)}")

    def _tied(self) -> bool:
        config = self.model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return bool(getattr(text, "tie_word_embeddings", False))


def _holds(copy: Copy, tensor: torch.Tensor) -> bool:
    """Whether the parameter's rows are those of ``tensor`` (synchronizes)."""
    return torch.equal(copy.source(tensor).to(copy.parameter.dtype), copy.destination())


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else "no message"
    return f"{type(error).__name__}: {line if len(line) <= 200 else line[:200] + chr(8230)}"
