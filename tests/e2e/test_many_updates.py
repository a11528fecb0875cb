# SPDX-License-Identifier: Apache-2.0
"""Twenty weight updates of one compiled engine: it samples as one that never saw another policy, and nothing moves or grows.

On a GPU the engine has CUDA graphs, and sleeps at level 2 before every update, as in training; a CPU has torch.compile only.
"""

import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import CUDA, Refit, engine, greedy
from references import assert_storage
from safetensors.torch import save_file
from tiny_models import VOCAB, make, wire

pytestmark = [pytest.mark.cpu_e2e, pytest.mark.slow, pytest.mark.timeout(900)]

UPDATES = 20
SETTLED = 5
"""Update after which nothing may grow any more: lazily made buffers and primitives exist by then."""

PROMPTS = [[5, 6, 7, 8], [100, 3, 50], list(range(20, 60))]
SIZES = dict(hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=6)
"""13 million quantized weights: one update kept by mistake, 13 MB of codes or 26 MB of BF16, stands out of a process's size."""

GROWTH = 1 << 20
"""Bytes a CPU process may grow from then to the last update. Seen: under 50 kB either way. A fifteenth of it, 70 kB an
update, is half a percent of the codes."""


def memory() -> int:
    """Bytes this process holds: on the GPU exactly, else resident memory after everything freed went back to the system."""
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
    """What twenty updates of one engine left behind; nothing of the engine itself."""

    weights: dict[str, torch.Tensor]
    sizes: list[int]
    outputs: list[list]
    code_change_rates: list[float]


def course(path: Path, precision: str) -> Course:
    """Train with AdamW, send every step's weights to one engine and sample from it."""
    trainer = make("qwen2.5", **SIZES)
    trainer.config.save_pretrained(path)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    result = Course({}, [], [], [])
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
            result.weights = wire(trainer)
            report = refit(result.weights, step)
            if CUDA:
                llm.wake_up(tags=["kv_cache"])
            result.code_change_rates.append(report["code_change_rate"])
            result.outputs.append([greedy(llm, tuple(prompt)) for prompt in PROMPTS])
            if step == 1:
                first = places(refit.model)
            assert places(refit.model) == first, f"update {step} moved a tensor"
            result.sizes.append(memory())
        assert_storage(dict(refit.model.named_parameters()), result.weights, precision)
    return result


def fresh_outputs(path: Path, precision: str) -> list:
    """What an engine of another process samples, that vLLM has loaded from ``path``."""
    words = [sys.executable, str(Path(__file__).parents[1] / "programs" / "fresh_engine.py")]
    done = subprocess.run(
        [*words, str(path), precision, json.dumps(PROMPTS)], capture_output=True, text=True, timeout=400, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line, done.stdout[-2000:] + done.stderr[-4000:]
    return [tuple(pair) for pair in json.loads(line.removeprefix("RESULT "))]


@pytest.mark.parametrize("precision", ["int8", pytest.param("fp8", marks=pytest.mark.gpu)])
def test_after_twenty_updates_the_engine_samples_as_one_loaded_with_the_last_weights(tmp_path, precision, record_property):
    seen = course(tmp_path, precision)
    gc.collect()  # vLLM's sleep mode wants its memory back before the next engine of this process
    assert min(seen.code_change_rates[1:]) > 0.01, "updates that change nothing would make this test empty"
    assert all(before != after for before, after in zip(seen.outputs, seen.outputs[1:], strict=False))
    growth = [size - seen.sizes[SETTLED - 1] for size in seen.sizes]
    record_property("bytes after each update, against the fifth", growth)
    assert growth[-1] == 0 if CUDA else growth[-1] < GROWTH
    save_file({name: tensor.contiguous() for name, tensor in seen.weights.items()}, tmp_path / "model.safetensors")
    assert seen.outputs[-1] == fresh_outputs(tmp_path, precision)
