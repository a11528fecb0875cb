# SPDX-License-Identifier: Apache-2.0
"""Load one weight update into a vLLM model and account for every tensor of it.

The first update after the engine starts is careful: all storage is poisoned first (NaN scales, NaN BF16), every tensor is
loaded alone and what it touched is recorded, and nothing may stay poisoned. That record is the baseline; a later update
must bring exactly the same names and shapes, and may therefore load whole buckets.
"""

import dataclasses
import time
import zlib
from collections.abc import Callable

import torch
from verl.workers.rollout.vllm_rollout.weight_update_utils import apply_buffer_updates
from vllm.distributed import get_tensor_model_parallel_world_size

from flashrl_verl.errors import RefitError
from flashrl_verl.quantization import numerics
from flashrl_verl.quantization.parameter import QuantizedWeight, observe_loads
from flashrl_verl.rollout.receipt import Manifest, checksum, to_host

NamedTensors = list[tuple[str, torch.Tensor]]

_SPOT_ROWS = 2
"""Rows of each sampled quantized tensor that are recomputed by ``numerics`` and compared with the storage afterwards."""

_LISTED = 20
"""Names an error lists before it only counts."""


@dataclasses.dataclass
class _SpotCheck:
    """What some rows of a quantized weight must hold after the update."""

    name: str
    weight: QuantizedWeight
    row: int
    codes: torch.Tensor
    scales: torch.Tensor


@dataclasses.dataclass
class _CopyCheck:
    """What an unquantized parameter must hold after the update: a copy of the tensor that arrived."""

    name: str
    parameter: torch.nn.Parameter
    rows: int
    sum: torch.Tensor


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

    def begin(self, step: int, stride: int) -> None:
        """Start an update: clear the account, and poison the storage if it is the first."""
        self.manifest = Manifest(step=step, stride=stride)
        self._problems: list[str] = []
        self._unexpected: list[str] = []
        self._spots: list[_SpotCheck] = []
        self._copies: list[_CopyCheck] = []
        self._parameters = dict(self.model.named_parameters())
        self._seconds = 0.0
        self._buffers = dict(self.model.named_buffers())
        self.last_receipt = {}
        for weight in self._quantized().values():
            weight.reset_account()
        if self.baseline is None:
            self._poison()

    def load(self, weights: NamedTensors) -> None:
        """Load one bucket. Problems are collected, not raised: the sender must be able to finish.

        Args:
            weights: (Hugging Face name, tensor) pairs; the tensors are not kept past this call.
        """
        started = time.perf_counter()
        for name, tensor in weights:
            self.manifest.add(name, tensor)
        if self.baseline is None:
            for item in weights:
                self._load_alone(*item)
        else:
            self._load_bucket(weights)
        self._seconds += time.perf_counter() - started

    def finish(self, process_weights: Callable[[], None]) -> dict:
        """End the update: let vLLM post-process, verify, and return the report.

        Args:
            process_weights: vLLM's ``process_weights_after_loading`` for this model.

        Returns:
            Plain data: receipt, seconds (load and post-processing on the host clock), tensors updated and left alone.

        Raises:
            RefitError: one error that lists everything unaccounted for; the engine's weights are then unusable.
        """
        started = time.perf_counter()
        self._check_account()
        if not self._problems:
            process_weights()
            self._check_storage()
        if self._problems:
            raise RefitError(f"weight update of step {self.manifest.step}: " + "; ".join(self._problems))
        if self.baseline is None:
            self.baseline = dict(self.manifest.shapes)
            self.addresses = self._current_addresses()
        self._seconds += time.perf_counter() - started
        self.last_receipt = self.manifest.receipt()
        return {
            "receipt": self.last_receipt,
            "seconds": self._seconds,
            "updated": len(self.manifest.shapes) - len(self.left_alone),
            "left_alone": list(self.left_alone),
            "unexpected": [],
        }

    def _quantized(self) -> dict[str, QuantizedWeight]:
        return {n: p for n, p in self.model.named_parameters() if isinstance(p, QuantizedWeight)}

    def _current_addresses(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self.model.named_parameters()}

    def _poison(self) -> None:
        for parameter in self.model.parameters():
            if isinstance(parameter, QuantizedWeight):
                parameter.poison()
            elif parameter.is_floating_point():
                parameter.data.fill_(float("nan"))

    def _load_alone(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor and classify it: it wrote parameters, it is ignored on purpose, or it is unexpected."""
        try:
            loaded = self._load_one(name, tensor)
        except Exception as error:  # noqa: BLE001 - models raise anything; the name is what the user needs
            self._problems.append(f"{name} {tuple(tensor.shape)} does not fit: {_first_line(error)}")
            return
        self.written[name] = loaded
        if loaded:
            return
        if name.endswith("rotary_emb.inv_freq") or (name.startswith("lm_head.") and self._tied()):
            self.left_alone.append(name)
        else:
            self._unexpected.append(name)

    def _load_one(self, name: str, tensor: torch.Tensor) -> set[str]:
        """Load one tensor under the spot check; returns the vLLM names it wrote."""
        if name in self._buffers:
            apply_buffer_updates(self.model, [(name, tensor)], self._buffers)
            return {name}
        with observe_loads(self._observer_for(name)):
            loaded = set(self.model.load_weights([(name, tensor)]) or ())
        if self.manifest.samples(name) and len(loaded) == 1:
            self._expect_copy(name, tensor, next(iter(loaded)))
        return loaded

    def _expect_copy(self, name: str, tensor: torch.Tensor, target: str) -> None:
        """Remember an unquantized parameter that must end up as a copy of ``tensor``; fused and sharded ones do not."""
        parameter = self._parameters.get(target)
        if parameter is None or isinstance(parameter, QuantizedWeight) or parameter.dtype != tensor.dtype or not tensor.dim():
            return
        padded_vocabulary = (
            parameter.shape[1:] == tensor.shape[1:]
            and parameter.shape[0] >= tensor.shape[0]
            and target.endswith(("embed_tokens.weight", "lm_head.weight"))
            and get_tensor_model_parallel_world_size() == 1
        )
        if parameter.shape == tensor.shape or padded_vocabulary:
            self._copies.append(_CopyCheck(name, parameter, tensor.shape[0], checksum(tensor)))

    def _load_bucket(self, weights: NamedTensors) -> None:
        weights = [(n, t) for n, t in weights if self.baseline.get(n) == tuple(t.shape)]  # the rest: _check_account
        # Sampled tensors are loaded one by one and their storage is checked; the others go as one bucket.
        alone = {n for n, _ in weights if self.manifest.samples(n) or n in self._buffers}
        sampled = [(n, t) for n, t in weights if n in alone]
        others = [(n, t) for n, t in weights if n not in alone]
        try:
            loaded = set(self.model.load_weights(others) or ()) if others else set()
            for name, tensor in sampled:
                loaded |= self._load_one(name, tensor)
        except Exception as error:  # noqa: BLE001
            names = ", ".join(n for n, _ in weights[:_LISTED])
            self._problems.append(f"loading a bucket failed ({names}): {_first_line(error)}")
            return
        skipped = [n for n, _ in weights if not self.written[n] <= loaded]
        if skipped:
            self._problems.append("the model did not load " + _list(skipped))

    def _observer_for(self, name: str):
        def observe(weight: QuantizedWeight, source: torch.Tensor, row_offset: int, column_offset: int) -> None:
            rows = min(_SPOT_ROWS, source.shape[0])
            # Other rows every step; the storage is compared after everything else has been loaded too.
            first = zlib.crc32(f"{name} {self.manifest.step}".encode()) % (source.shape[0] - rows + 1)
            sample = source.narrow(0, first, rows).clone()
            scales = numerics.row_scales(sample)
            local = sample.narrow(1, column_offset, weight.shape[1])
            codes, _ = numerics.quantize_rows(local, scales)
            self._spots.append(_SpotCheck(name, weight, row_offset + first, codes, scales))

        return observe

    def _check_account(self) -> None:
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
        bad = self.manifest.non_finite()
        if bad:
            self._problems.append("NaN or Inf in " + _list(bad))
        partial = [
            f"{n} ({w.loaded_elements} of {w.numel()} elements)"
            for n, w in self._quantized().items()
            if w.loaded_elements != w.numel()
        ]
        if partial:
            self._problems.append("quantized weights that were not written exactly once: " + _list(partial))
        if self.baseline is None and not bad and not partial:
            names, flags = [], []
            for name, parameter in self.model.named_parameters():
                if isinstance(parameter, QuantizedWeight):
                    names.append(name)
                    flags.append((parameter.data == numerics.UNWRITTEN_CODE).any())
                elif parameter.is_floating_point() and parameter.numel():
                    names.append(name)
                    flags.append(torch.stack(parameter.data.aminmax()).isnan().any())
            holes = [n for n, hole in zip(names, to_host(flags), strict=True) if hole]
            if holes:
                self._problems.append("parameters the update left (partly) unwritten: " + _list(holes))

    def _check_storage(self) -> None:
        """The storage must hold what ``numerics`` gives for sampled rows, or a copy of what arrived, where it always lay."""
        moved = [n for n, address in self._current_addresses().items() if self.addresses.get(n, address) != address]
        if moved:
            self._problems.append("parameters that moved, which CUDA graphs would not see: " + _list(moved))
        stored = to_host([checksum(copy.parameter.data[: copy.rows]) for copy in self._copies])
        stale = [c.name for c, s, a in zip(self._copies, stored, to_host([c.sum for c in self._copies]), strict=True) if s != a]
        self._copies.clear()
        if stale:
            self._problems.append("parameters that are not copies of the tensors that arrived: " + _list(stale))
        wrong = []
        for spot in self._spots:
            rows = slice(spot.row, spot.row + len(spot.codes))
            same_codes = torch.equal(spot.weight.data[rows].cpu(), spot.codes.cpu())
            if not same_codes or not torch.equal(spot.weight.scales.data[rows].cpu(), spot.scales.cpu()):
                wrong.append(spot.name)
        self._spots.clear()
        if wrong:
            self._problems.append("the stored codes are not those of the tensors that arrived: " + _list(wrong))

    def _tied(self) -> bool:
        config = self.model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return bool(getattr(text, "tie_word_embeddings", False))


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else "no message"
    return f"{type(error).__name__}: {line if len(line) <= 200 else line[:200] + chr(8230)}"
