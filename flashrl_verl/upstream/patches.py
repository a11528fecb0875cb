# SPDX-License-Identifier: Apache-2.0
"""The ledger of what this package changes in verl and vLLM outside a subclass or a registry. One entry a function.

Three objects of a run are changed where they are made: the replay buffer, whose `_wait_for_next_poll` looks for dead
workers too, and whose `_materialize_batch` and `_evict_terminal_groups` count missing responses (trainer/trainer.py);
and the classes of the trainer's head for FP32 logits (fp32_head.py) and of the engine's KV cache manager
(rollout/scheduler.py).

=====================================  =================================================================================
target                                 ``verl.utils.distributed.initialize_global_process_group_ray``
why                                    it joins "cpu:gloo" and "<device>:<backend>"; on the CPU platform that is
                                       "cpu:gloo,cpu:gloo", which torch refuses. It takes ``backend=``, but its caller
                                       (``TrainingWorker.__init__``) passes none
applied                                only when VERL_PLATFORM=cpu, when the module is imported
upstream                               https://github.com/verl-project/verl/blob/main/verl/utils/distributed.py
versions                               verl 0.9.1
drop it when                           the function leaves out a repeated device
tested by                              tests/unit/test_platform_cpu.py, every end-to-end run on CPU
=====================================  =================================================================================

=====================================  =================================================================================
target                                 ``verl.utils.torch_functional.logprobs_from_logits_v2``
why                                    without the package flash-attn it takes the log-softmax of every token by itself,
                                       thousands of kernels a micro-batch, and of BF16 logits in BF16: ``log_probs.py``
                                       takes many at a time, in float32
applied                                in trainers' workers (``worker.py``), without effect where flash-attn is there
upstream                               https://github.com/verl-project/verl/blob/main/verl/utils/torch_functional.py
versions                               verl 0.9.1
drop it when                           the function takes a batch of tokens at a time
tested by                              tests/unit/test_log_probs.py
=====================================  =================================================================================

=====================================  =================================================================================
target                                 ``verl.utils.tensordict_utils.index_select_tensor_dict``
why                                    it takes every row of every column apart to select the few of a micro-batch: with
                                       1,024 rows and ten columns 0.1 s a micro-batch, of which there may be hundreds
applied                                in trainers' workers (``worker.py``)
upstream                               https://github.com/verl-project/verl/blob/main/verl/utils/tensordict_utils.py
versions                               verl 0.9.1
drop it when                           the function reads the rows that it selects, and no others
tested by                              tests/unit/test_select_rows.py
=====================================  =================================================================================

=====================================  =================================================================================
target                                 ``verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_module``
why                                    it casts the loaded model to ``fsdp_config.model_dtype``, buffers too. In BF16
                                       frequencies of RoPE lose 16 bits, and a token at position 1,500 is turned by up
                                       to 1.7 radians (heads of 128, theta 1e6) more or less than in the rollout
applied                                in the actor's and the reference's workers (``worker.py``): only parameters are
                                       cast, so a router's ``e_score_correction_bias`` stays in FP32 too
upstream                               https://github.com/verl-project/verl/blob/main/verl/workers/engine/fsdp/transformer_impl.py
                                       (NVIDIA-NeMo/Automodel#2549 mends the same there)
versions                               verl 0.9.1
drop it when                           the method casts parameters only
tested by                              tests/unit/test_buffers.py
=====================================  =================================================================================

=====================================  =================================================================================
target                                 ``vllm.model_executor.layers.fused_moe.fused_moe.moe_kernel_quantize_input``
why                                    vLLM's function of fused experts quantizes the inputs of both products by itself,
                                       and rotated experts need theirs rotated
applied                                while ``QuantizedMoEMethod.apply`` of rotated experts calls that function
upstream                               vllm/model_executor/layers/fused_moe/fused_moe.py
versions                               vLLM 0.24, 0.31
drop it when                           the function takes a quantizer
tested by                              tests/numerics/test_moe_kernels.py on a GPU
=====================================  =================================================================================

=====================================  =================================================================================
target                                 ``verl.trainer.ppo.v1.trainer_base.RayWorkerGroup``
why                                    the port of the trainers' process group is one that the kernel gave and got back:
                                       until rank 0 listens, seconds later, it may give it to another process, and the
                                       run ends (one start of eighteen side by side, EADDRINUSE). The group takes
                                       ``master_port_range=``, but its caller passes none
applied                                when the trainer sets its workers up (``trainer.py``)
upstream                               https://github.com/verl-project/verl/blob/main/verl/single_controller/ray/base.py
versions                               verl 0.9.1
drop it when                           the trainer passes a range, or the port is kept open
tested by                              tests/unit/test_run_environment.py, every end-to-end run
=====================================  =================================================================================
"""

import contextlib
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

from flashrl_verl.errors import FlashRLError


def default_to_gloo(distributed: types.ModuleType) -> None:
    """Apply the entry above to ``verl.utils.distributed``.

    Raises:
        FlashRLError: the function is no longer what the entry describes.
    """
    original = distributed.initialize_global_process_group_ray
    if "backend" not in inspect.signature(original).parameters:
        raise FlashRLError(
            "verl.utils.distributed.initialize_global_process_group_ray has no argument `backend` any more; see the "
            "entry in flashrl_verl/upstream/patches.py and use verl 0.9.1"
        )
    distributed.initialize_global_process_group_ray = functools.partial(original, backend="gloo")


FREE_PORTS = 20_000, 30_000
"""Above those of Ray's workers, and below Kubernetes' NodePorts and what Linux gives whoever asks for any port
(ip_local_port_range)."""


def choose_ports(trainer_base: types.ModuleType) -> None:
    """Apply the entry above to ``verl.trainer.ppo.v1.trainer_base``: each group looks for a port from a random one on,
    as two runs of a host look at the same time."""
    original = trainer_base.RayWorkerGroup

    def with_port(*args: Any, **kwargs: Any) -> Any:
        low, high = FREE_PORTS
        kwargs.setdefault("master_port_range", [random.SystemRandom().randrange(low, high - 1000), high])
        return original(*args, **kwargs)

    trainer_base.RayWorkerGroup = with_port


def patch_logprobs_from_logits(torch_functional: types.ModuleType, log_probs: Callable) -> None:
    """Apply the second entry to ``verl.utils.torch_functional``: ``log_probs`` of logits and labels.

    Raises:
        FlashRLError: it has no such function any more.
    """
    name = "logprobs_from_logits_v2"
    if not hasattr(torch_functional, name):
        raise FlashRLError(
            f"verl.utils.torch_functional has no {name} any more; see the entry in "
            "flashrl_verl/upstream/patches.py and use verl 0.9.1"
        )
    setattr(torch_functional, name, log_probs)


def patch_index_select(tensordict_utils: types.ModuleType) -> None:
    """Apply the third entry to ``verl.utils.tensordict_utils``; a second time it does nothing.

    Raises:
        FlashRLError: it has no such function any more.
    """
    name = "index_select_tensor_dict"
    original = getattr(tensordict_utils, name, None)
    if original is None:
        raise FlashRLError(
            f"verl.utils.tensordict_utils has no {name} any more; see the entry in "
            "flashrl_verl/upstream/patches.py and use verl 0.9.1"
        )
    if not hasattr(original, "__wrapped__"):
        setattr(tensordict_utils, name, _reading_selected_rows(original))


def _reading_selected_rows(original: Callable) -> Callable:
    import torch

    def is_ragged(column: Any) -> bool:
        """Rows of one dimension, one behind the other."""
        nested = isinstance(column, torch.Tensor) and column.is_nested and column.layout is torch.jagged
        return nested and column.dim() == 2 and column.lengths() is None

    @functools.wraps(original)
    def index_select(batch: Any, indices: Any) -> Any:
        ragged = [key for key, column in (() if batch is None else batch.items()) if is_ragged(column)]
        if not ragged:
            return original(batch, indices)
        selected = original(batch.exclude(*ragged), indices)
        rows = indices.tolist() if isinstance(indices, torch.Tensor) else indices
        for key in ragged:
            values, ends = batch[key].values(), batch[key].offsets().tolist()
            parts = [values[ends[row] : ends[row + 1]] for row in rows]
            selected[key] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        return selected

    return index_select


def keep_buffers(engine: type) -> None:
    """Apply the entry of ``FSDPEngine._build_module`` to that class; a second time it does nothing.

    Raises:
        FlashRLError: when a model is built, and not cast by its ``to``.
    """
    from transformers import PreTrainedModel

    original = engine._build_module
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def build_module(self: Any) -> Any:
        casts, whole = 0, PreTrainedModel.to

        def cast_parameters(module: Any, dtype: Any) -> Any:
            nonlocal casts
            casts += 1
            for parameter in module.parameters():
                parameter.data = parameter.data.to(dtype)
            return module

        PreTrainedModel.to = cast_parameters
        try:
            module = original(self)
        finally:
            PreTrainedModel.to = whole
        if isinstance(module, PreTrainedModel) and not casts:
            raise FlashRLError(
                f"{engine.__name__}._build_module does not cast by `to` any more; see the entry in "
                "flashrl_verl/upstream/patches.py and use verl 0.9.1"
            )
        return module

    engine._build_module = build_module


@contextlib.contextmanager
def quantizing_experts_inputs(fused_moe: types.ModuleType, quantize: Callable) -> Iterator[None]:
    """Apply the last entry to ``vllm.model_executor.layers.fused_moe.fused_moe`` for the time of a call.

    Args:
        fused_moe: the module.
        quantize: x [T, K] -> codes [T, K], scales [T, 1] float32.

    Raises:
        FlashRLError: it was not asked for both products: they would be of rotated weights and other activations.
    """
    name, calls = "moe_kernel_quantize_input", 0

    def counted(A: Any, **_: Any) -> Any:  # noqa: N803 - vLLM's name of it
        nonlocal calls
        calls += 1
        return quantize(A)

    original = getattr(fused_moe, name, None)
    setattr(fused_moe, name, counted)
    try:
        yield
    finally:
        setattr(fused_moe, name, original)
    if calls < 2:
        raise FlashRLError(
            f"{fused_moe.__name__} did not quantize its inputs by {name} ({calls} of 2 times); see the entry in "
            "flashrl_verl/upstream/patches.py. Add 're:.*experts' to flashrl.ignore, or install a tested vLLM "
            "(`flashrl version`)"
        )
