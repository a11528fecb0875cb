# SPDX-License-Identifier: Apache-2.0
"""What vLLM's modules ask of a process in which they are built without an engine around them."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The one-process groups that vLLM's layers ask for."""
    from vllm.distributed.parallel_state import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend)
        initialize_model_parallel(1)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


@contextlib.contextmanager
def vllm_config(path: Path, **arguments: Any) -> Iterator[Any]:
    """vLLM's configuration for a model folder, set as the current one."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    engine_args = EngineArgs(
        str(path), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=256, **arguments
    )
    config = engine_args.create_engine_config()
    with set_current_vllm_config(config):
        yield config
