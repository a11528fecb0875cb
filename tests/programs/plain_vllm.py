# SPDX-License-Identifier: Apache-2.0
"""vLLM as anybody has it: a process without this package and its plugin, which loads a folder and samples greedily.

python plain_vllm.py FOLDER PROMPTS.json ANSWER.json
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def greedy(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens of all prompts together, and the log-prob of each."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = [r.outputs[0] for r in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]
    return [list(o.token_ids) for o in outputs], [
        [step[token].logprob for token, step in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs
    ]


def ours(path: Path) -> bool:
    """Whether Python would find this project or its entry points there."""
    return (path / "flashrl_verl").is_dir() or any(path.glob("flashrl_verl-*.dist-info"))


def ask(folder: Path, prompts: list[list[int]], tokens: int, scratch: Path) -> dict[str, Any]:
    """Start the process; returns ``quantization``, ``tokens`` and ``log_probs``."""
    files = [scratch / name for name in ("prompts.json", "answer.json")]
    files[0].write_text(json.dumps({"prompts": prompts, "tokens": tokens}))
    # vLLM itself may come from PYTHONPATH; this project may not.
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and not ours(Path(path))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, __file__, str(folder), *map(str, files)],
        cwd=scratch,
        env=env | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(files[1].read_text())


def main() -> None:
    import torch
    import vllm

    folder, asked, answer = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    room = {"gpu_memory_utilization": 0.15, "kv_cache_memory_bytes": 256 << 20} if torch.cuda.is_available() else {}
    llm = vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_batched_tokens=256,
        logprobs_mode="processed_logprobs",
        **room,
    )
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert "flashrl" not in QUANTIZATION_METHODS and not [name for name in sys.modules if name.startswith("flashrl")]
    tokens, log_probs = greedy(llm, asked["prompts"], asked["tokens"])
    config = llm.llm_engine.vllm_config.model_config
    answer.write_text(
        json.dumps(
            {"quantization": config.quantization, "dtype": str(config.dtype), "tokens": tokens, "log_probs": log_probs}
        )
    )


if __name__ == "__main__":
    main()
