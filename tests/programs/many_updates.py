# SPDX-License-Identifier: Apache-2.0
"""Twenty weight updates of one compiled engine, and what is seen of them."""

import ctypes
import dataclasses
import gc
import os
from pathlib import Path

import torch
from engines import CUDA, Refit, engine, greedy
from references import assert_storage
from safetensors.torch import save_file
from tiny_models import VOCAB, make, wire

UPDATES = 20
PROMPTS = [[5, 6, 7, 8], [100, 3, 50], list(range(20, 60))]
SIZES = dict(hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=6)
"""13 million quantized weights: one update kept by mistake, 13 MB of codes or 26 MB of BF16, stands out of a process's
size."""


def memory() -> int:
    """Bytes this process holds: on the GPU exactly, else resident memory after everything freed went back to the
    system."""
    gc.collect()
    if CUDA:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def places(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


@dataclasses.dataclass
class Course:
    """What was seen during twenty updates of one engine."""

    sizes: list[int]
    outputs: list[list]
    code_change_rates: list[float]


def course(path: Path, precision: str) -> Course:
    """Train with AdamW, send every step's weights to one engine and sample from it; the last weights are left in
    ``path``.

    In a process of its own: vLLM's sleep mode is for one engine a process.
    """
    trainer = make("qwen2.5", **SIZES)
    trainer.config.save_pretrained(path)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    result = Course([], [], [])
    with engine(path, {"precision": precision}, compiled=True, enable_sleep_mode=CUDA) as llm:
        refit = Refit(llm)
        for step in range(1, UPDATES + 1):
            ids = torch.randint(VOCAB, (4, 16), generator=generator)
            trainer(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if CUDA:
                llm.sleep(level=2)
                llm.wake_up(tags=["weights"])
            weights = wire(trainer)
            report = refit(weights, step)
            if CUDA:
                llm.wake_up(tags=["kv_cache"])
            result.code_change_rates.append(report["code_change_rate"])
            result.outputs.append([greedy(llm, tuple(prompt)) for prompt in PROMPTS])
            if step == 1:
                first = places(refit.model)
            assert places(refit.model) == first, f"update {step} moved a tensor"
            result.sizes.append(memory())
        assert_storage(dict(refit.model.named_parameters()), weights, precision)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors")
    return result
