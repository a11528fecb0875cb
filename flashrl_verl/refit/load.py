# SPDX-License-Identifier: Apache-2.0
"""Load one weight update into a vLLM model, through the model's own ``load_weights``, and account for every tensor of
it.

Every update is the same operation. All storage is poisoned first (NaN, for 8-bit codes in their scales), the buckets go
to ``load_weights``, whose parameters quantize what they are given (``../quantization/parameter.py``), and at the end

- the names, shapes and dtypes are those of the first update, in the dtype of the rollout;
- no parameter, quantized or not, holds NaN or Inf, arrived or left over, and quantized elements were written exactly
  once;
- no parameter has moved, which CUDA graphs would not see.

In the first update a tensor that no parameter takes is refused by name. What arrived is compared with what was sent by
the driver (``receipt.py``).
"""

import bisect
import logging
import time
import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from verl.workers.rollout.vllm_rollout.weight_update_utils import apply_buffer_updates
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from flashrl_verl.attention.equalize import measure
from flashrl_verl.errors import RefitError, listed
from flashrl_verl.quantization.numerics import as_bytes
from flashrl_verl.quantization.parameter import QuantizedStorage
from flashrl_verl.refit.receipt import Manifest
from flashrl_verl.refit.scan import non_finite
from flashrl_verl.refit.wire import wire_dtype

logger = logging.getLogger(__name__)

NamedTensors = list[tuple[str, torch.Tensor]]


class WeightRefit:
    """Owns the account of one model across updates. Not thread-safe: vLLM's worker calls it from one thread.

    Args:
        model: a vLLM model.
        model_config: vLLM's configuration of it.
        device: where its parameters are.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any, device: torch.device):
        self.model, self.device = model, device
        self.last_receipt: dict = {}
        """Of the last whole update; empty when there was none or the last one failed."""
        self._model_config = model_config
        self._first: dict[str, tuple[tuple[int, ...], str]] | None = None  # shapes and dtypes of the first whole update
        self._meter: CodeChangeMeter | None = None
        # By what was built: parameters that are others' are not named.
        self._tied = not any("lm_head" in name.split(".") for name, _ in model.named_parameters())
        self._buffers = dict(model.named_buffers())
        # Where each parameter was when the engine captured its CUDA graphs.
        self._addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    def begin(self, step: int) -> None:
        """Start an update: poison all storage. Args: step: the trainer's global step."""
        self._manifest, self.last_receipt, self._seconds = Manifest(step), {}, 0.0
        self._problems: list[str] = []
        self._skipped: list[str] = []
        self._unread: list[str] = []
        poison(dict(self.model.named_parameters()))

    def load(self, weights: NamedTensors) -> None:
        """Load one bucket. Errors are collected, not raised: the sender must be able to finish.

        Args:
            weights: (Hugging Face name, tensor) pairs; the tensors are not kept past this call.
        """
        started, self._loading = time.perf_counter(), "a bucket"
        try:
            self._manifest.add(weights)
            if not self._problems:
                self._load(weights)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the receiver does so next: it frees the bucket
        except Exception as error:  # noqa: BLE001 - models raise anything; the name is what the user needs
            # As text: a kept traceback would keep the bucket, whose memory the sender is about to take away.
            logger.error("loading %s failed\n%s", self._loading, traceback.format_exc())
            hint = ""
            if any(n == self._loading and ".experts." in n and t.dim() == 3 for n, t in weights):
                hint = " (verl sends experts one by one for models named as Qwen's only)"
            elif "no module or parameter named" in str(error):
                hint = " (verl sends the names of transformers' modules, and vLLM's model has others, in any precision)"
            self._problems.append(f"{self._loading} cannot be loaded: {_first_line(error)}{hint}")
        self._seconds += time.perf_counter() - started

    def finish(self) -> dict:
        """End the update: let vLLM post-process, verify, and return the report.

        Returns:
            Plain data: ``seconds`` (``load``: the loading itself; ``finish``: post-processing and verification),
            ``tensors``, ``quantized``: number of quantized parameters, ``skipped``: names of tensors the
            model has no use for, and ``code_change_rate``: share of sampled codes that changed (None at first).

        Raises:
            RefitError: one error that lists everything unaccounted for; the engine's weights are then unusable.
        """
        started, manifest = time.perf_counter(), self._manifest
        self._check_arrived()
        if not self._problems:
            process_weights_after_loading(self.model, self._model_config, self.device)
        receipt = manifest.receipt()
        if not self._problems:
            self._check_skipped(receipt["tensors"])
        parameters = dict(self.model.named_parameters())
        quantized = {name: p for name, p in parameters.items() if isinstance(p, QuantizedStorage)}
        if not self._problems:
            self._check_storage(parameters, quantized)
        if not self._problems:
            try:
                measure(self.model, self._model_config)
            except ValueError as error:
                self._problems.append(str(error))
        if self._problems:
            raise RefitError(
                f"weight update of step {manifest.step}: {'; '.join(self._problems)}. Nothing was sampled from it; "
                "resume from the last checkpoint. Should the same appear with flashrl.precision=bf16, the model or "
                "vLLM's version (`flashrl version`) is not supported; a layer that only 8 bits do not suit goes into "
                "flashrl.ignore"
            )
        self._meter = self._meter or CodeChangeMeter(list(quantized.values()))
        changed = self._meter.measure()
        self._first, self.last_receipt = manifest.tensors, receipt
        return {
            "seconds": {"load": self._seconds, "finish": time.perf_counter() - started},
            "tensors": len(manifest.tensors),
            "quantized": len(quantized),
            "skipped": self._skipped,
            "code_change_rate": changed,
        }

    def _load(self, weights: NamedTensors) -> None:
        # A head that is the embedding: vLLM's model has no parameter for it.
        self._skipped += [name for name, _ in weights if self._tied and name.startswith("lm_head.")]
        weights = [(name, tensor) for name, tensor in weights if name not in self._skipped]
        buffers = [(name, tensor) for name, tensor in weights if name in self._buffers]
        weights = [(name, tensor) for name, tensor in weights if name not in self._buffers]

        def one_by_one():
            for self._loading, tensor in weights:
                yield self._loading, tensor

        apply_buffer_updates(self.model, buffers, self._buffers)
        if self._first is not None:
            self.model.load_weights(one_by_one())
            return
        with _Reads(weights) as reads:
            self.model.load_weights(one_by_one())
        self._unread += reads.unread()

    def _check_arrived(self) -> None:
        """The tensors of the first update, no other, each once, finite, in the rollout's dtype."""
        seen, first = self._manifest.tensors, self._first
        self._report("tensors that arrived more than once", self._manifest.repeated)
        self._report("unexpected tensors that no parameter takes", self._unread)
        if first is None:
            dtype = self._model_config.dtype
            wrong = [n for n, (_, found) in seen.items() if found != _name(wire_dtype(n, getattr(torch, found), dtype))]
            self._report(f"tensors that were not sent in the rollout's dtype, {_name(dtype)}", wrong)
        elif seen != first:
            self._report("missing tensors", [n for n in first if n not in seen])
            self._report("unexpected tensors", [n for n in seen if n not in first])
            differ = [n for n in seen if n in first and seen[n] != first[n]]
            self._report("changed tensors", [f"{n} {_kind(seen[n])} instead of {_kind(first[n])}" for n in differ])

    def _check_skipped(self, words: dict[str, str]) -> None:
        """A head that is the embedding in the engine has to be that in the trainer, which ties by the checkpoint."""
        others = {said for name, said in words.items() if name not in self._skipped}
        apart = [name for name in self._skipped if words[name] not in others]
        tied = "weights that are not the embedding to which config.json ties them (tie_word_embeddings=false there)"
        self._report(tied, apart)

    def _check_storage(self, parameters: dict[str, torch.nn.Parameter], quantized: dict[str, QuantizedStorage]) -> None:
        """Everything was written, quantized elements exactly once, and nothing has moved."""
        partial = [
            f"{n} ({p.loaded_elements} of {p.numel()} elements)"
            for n, p in quantized.items()
            if p.loaded_elements != p.numel()
        ]
        self._report("quantized weights that were not written exactly once", partial)
        arrived = {n: buffer for n, buffer in self._buffers.items() if n in self._manifest.tensors}
        held = {name: tensor.data for name, tensor in {**parameters, **arrived}.items() if _takes_nan(tensor)}
        if bad := non_finite(held):  # poison that is left, or as they arrived
            self._problems.append(
                f"NaN or Inf in {listed(bad)}: it arrived so, or the loader left that part unwritten. If the trainer "
                "diverged, resume from a checkpoint before it with a lower actor_rollout_ref.actor.optim.lr or "
                "actor_rollout_ref.actor.optim.clip_grad"
            )
        moved = [n for n, p in parameters.items() if self._addresses.get(n, p.data_ptr()) != p.data_ptr()]
        self._report("parameters that moved, which CUDA graphs would not see", moved)

    def _report(self, text: str, names: list[str]) -> None:
        if names:
            self._problems.append(f"{text}: {listed(names)}")


def poison(parameters: dict[str, torch.nn.Parameter]) -> None:
    """Overwrite storage with NaN so that nothing that is not written can pass for a weight.

    8-bit codes cannot hold NaN in every format, and need not: their scales are parameters too, and the kernel writes
    both of a row together.
    """
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters.values():
        if isinstance(parameter, QuantizedStorage):
            parameter.loaded_elements = 0
        elif _takes_nan(parameter):
            alike.setdefault(parameter.dtype, []).append(parameter.data)
    for tensors in alike.values():
        torch._foreach_mul_(tensors, float("nan"))  # a few launches for hundreds of norms and scales


def _takes_nan(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize > 1 and parameter.numel() > 0


class _Reads(TorchDispatchMode):
    """Notes which tensors of a bucket any operation reads: a tensor that none reads is one that no parameter takes.

    vLLM's models leave out some names without a word, and return the names of parameters, not of tensors.
    """

    def __init__(self, weights: NamedTensors):
        super().__init__()
        self._tensors = sorted((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in weights if tensor.numel())
        self._starts = [start for start, _, _ in self._tensors]
        self._read: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for value in tree_leaves(args):
            if isinstance(value, torch.Tensor) and value.numel():
                self._note(value.data_ptr())
        return function(*args, **(kwargs or {}))

    def _note(self, address: int) -> None:
        place = bisect.bisect_right(self._starts, address) - 1
        if place >= 0:
            start, size, name = self._tensors[place]
            if address < start + size:
                self._read.add(name)

    def unread(self) -> list[str]:
        return [name for _, _, name in self._tensors if name not in self._read]


class CodeChangeMeter:
    """Share of codes that an update changed, over the same sampled rows every time.

    At a learning rate below the quantization step the policy that samples stands still although the trainer's moves:
    the share says so.

    Args:
        weights: the model's quantized weights; rows of up to ``_WEIGHTS`` of them are sampled.
    """

    _WEIGHTS, _ROWS = 16, 4

    def __init__(self, weights: list[QuantizedStorage]):
        self._rows = []
        for weight in weights[:: max(1, len(weights) // self._WEIGHTS)]:
            count = weight.rows.shape[0]
            rows = torch.arange(0, count, max(1, count // self._ROWS), device=weight.data.device)[: self._ROWS]
            self._rows.append((weight, rows))
        self._last: torch.Tensor | None = None

    def measure(self) -> float | None:
        """Return the share since the last call, 0 to 1; None at the first, and where nothing is quantized."""
        if not self._rows:
            return None
        # Bytes: index_select knows no FP8 dtypes.
        now = torch.cat([as_bytes(weight.rows).index_select(0, rows).flatten() for weight, rows in self._rows])
        last, self._last = self._last, now
        return None if last is None else float((now != last).float().mean())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(entry: tuple[tuple[int, ...], str]) -> str:
    return f"{entry[1]} {list(entry[0])}"


def _first_line(error: BaseException) -> str:
    """An exception in one line of at most about 200 characters."""
    line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {line if len(line) <= 200 else line[:200] + chr(8230)}"
