# SPDX-License-Identifier: Apache-2.0
"""The first update of a model, through vLLM's own loaders: it finds out what every tensor becomes.

All storage is poisoned first (unwritten codes, NaN scales, NaN BF16), and nothing may stay so. What each tensor writes is
recorded: the load plan, and the names that every later update must bring.
"""

import torch
from verl.workers.rollout.vllm_rollout.weight_update_utils import apply_buffer_updates

from flashrl_verl.quantization.parameter import QuantizedStorage, observe_loads
from flashrl_verl.rollout.plan import Copy, LoadPlan, NamedTensors, find_copy
from flashrl_verl.rollout.poison import poison
from flashrl_verl.rollout.receipt import to_host
from flashrl_verl.rollout.recorder import LoadRecorder


class FirstLoad:
    """One careful update. Problems are collected: the sender must be able to finish.

    Args:
        model: a vLLM model.
        plan: empty; written to.
        recorder: writes the plan.
    """

    def __init__(self, model: torch.nn.Module, plan: LoadPlan, recorder: LoadRecorder):
        self.written: dict[str, set[str]] = {}
        """Name of each tensor of the update -> the parameters it wrote."""
        self.left_alone: list[str] = []
        """Tensors the model ignores on purpose (a tied ``lm_head``, rotary inverse frequencies)."""
        self.unexpected: list[str] = []
        """Tensors that no parameter takes."""
        self.problems: list[str] = []
        """Tensors that do not fit, and why."""
        self._model, self._plan, self._recorder = model, plan, recorder
        self._parameters = dict(model.named_parameters())
        self._buffers = dict(model.named_buffers())
        self._names = {id(p): n for n, p in self._parameters.items()}
        poison(self._parameters)

    def load(self, weights: NamedTensors) -> None:
        """Load a bucket at once, then everything that was not quantized alone: what it wrote, if anything, is the record."""
        plain = [(name, tensor) for name, tensor in weights if name not in self._buffers]
        try:
            with observe_loads(self._recorder):
                self._model.load_weights(self._recorder.watch(plain))
        except Exception:  # noqa: BLE001 - one by one, the tensor at fault has a name
            self._recorder.take_back({name for name, _ in plain})
        for name, tensor in weights:
            if name in self._recorder.written:
                self.written[name] = {self._names[id(weight)] for weight in self._recorder.written[name]}
            else:
                self._load_alone(name, tensor)

    def holes(self) -> list[str]:
        """Names of the parameters in which poison is left (synchronizes)."""
        names, flags = [], []
        for name, parameter in self._parameters.items():
            if isinstance(parameter, QuantizedStorage):
                names.append(name)
                flags.append(parameter.unwritten())
            elif parameter.is_floating_point() and parameter.numel() and parameter.dtype.itemsize > 1:
                names.append(name)
                flags.append(torch.stack(parameter.data.aminmax()).isnan().any())
        return [n for n, hole in zip(names, to_host(flags), strict=True) if hole]

    def _load_alone(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor and classify it: it wrote parameters, it is ignored on purpose, or it is unexpected."""
        try:
            if name in self._buffers:
                apply_buffer_updates(self._model, [(name, tensor)], self._buffers)
                loaded = {name}
            else:
                with observe_loads(self._recorder):
                    loaded = set(self._model.load_weights(self._recorder.watch([(name, tensor)])) or ())
        except Exception as error:  # noqa: BLE001 - models raise anything; the name is what the user needs
            self.problems.append(f"{name} {tuple(tensor.shape)} does not fit: {first_line(error)}")
            return
        self.written[name] = loaded
        if loaded:
            if len(loaded) == 1 and name not in self._buffers:
                self._plan_copy(name, tensor, next(iter(loaded)))
            return
        if name.endswith("rotary_emb.inv_freq") or (name.startswith("lm_head.") and self._tied()):
            self.left_alone.append(name)
            self._plan.left_alone.add(name)
        else:
            self.unexpected.append(name)

    def _plan_copy(self, name: str, tensor: torch.Tensor, target: str) -> None:
        """Put ``tensor`` into the plan if the model makes rows of ``target`` a plain copy of rows of it."""
        parameter = self._parameters.get(target)
        if parameter is None or isinstance(parameter, QuantizedStorage) or not tensor.dim() or not tensor.is_floating_point():
            return
        copy = Copy(parameter, 0, tensor.shape[0], 0) if parameter.shape == tensor.shape else None
        # Equal shapes alone prove nothing: with tensor parallelism 2, gate's and up's rows of a rank together are as many as
        # gate has, and a bias that is still zero would look like a copy too.
        if copy is None or not _holds(copy, tensor) or bool((tensor == tensor.flatten()[0]).all()):
            try:
                copy = find_copy(parameter, tensor, lambda probe: self._model.load_weights([(name, probe)]))
            except Exception:  # noqa: BLE001 - a loader that takes no probe is asked for the tensor every time
                copy = None
                self._model.load_weights([(name, tensor)])
        if copy is not None and _holds(copy, tensor):
            self._plan.copies[name] = copy

    def _tied(self) -> bool:
        config = self._model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return bool(getattr(text, "tie_word_embeddings", False))


def _holds(copy: Copy, tensor: torch.Tensor) -> bool:
    """Whether the parameter's rows are those of ``tensor`` (synchronizes)."""
    return torch.equal(copy.source(tensor).to(copy.parameter.dtype), copy.destination())


def first_line(error: BaseException) -> str:
    """An exception in one line of at most about 200 characters."""
    text = str(error).strip().splitlines()
    line = text[0] if text else "no message"
    return f"{type(error).__name__}: {line if len(line) <= 200 else line[:200] + chr(8230)}"
