# SPDX-License-Identifier: Apache-2.0
"""How far the rollout's policy is from the trainer's, by variant, without training.

    python -m benchmarks.mismatch --variants int8,int8+int8kv,fp8
    python -m benchmarks.mismatch --model /shared/models/Qwen2.5-7B-Instruct --data gsm8k.parquet --tokens 512
    python -m benchmarks.mismatch --model qwen2.5-0.5b --layers 6 --variants int8      # random weights

One vLLM engine after another, BF16 first, gets the model's weights as a run sends them and samples at temperature 1.
The trainer's side is the Hugging Face model with BF16 weights under autocast to BF16, as verl's FSDP engine computes,
and verl's own function of log-probs. Two sets of tokens are compared: each engine's own samples, which is what a run
logs, and the BF16 engine's samples scored by all of them. Last, what quantization does to each type of layer. Engines
run eagerly, without CUDA graphs.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import environment, in_own_process, run, show, words_of, write_json
from benchmarks.random_model import make_model
from flashrl_verl.errors import ConfigError

K3_KL = "rollout_corr/k3_kl"
PROBS_DIFF = "training/rollout_probs_diff_mean"
CORRELATION = "training/rollout_actor_probs_pearson_corr"
ESS = "rollout_corr/rollout_is_eff_sample_size"
LOGIT_BYTES = 2 << 30
"""Room for the logits of one batch of the trainer's."""
NOISE_TOKENS = 2048
"""Tokens whose activations go through every layer in float64."""

Tokens = list[list[int]]
LogProbs = list[list[float]]

# ---- the engine ----


def sample(model: str, variant: str, job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, sample a response to each prompt, and score its own and the common ones (None: its own)."""
    from vllm import SamplingParams

    from benchmarks.engine import formats_of, start
    from flashrl_verl.quantization.formats import weight_format
    from flashrl_verl.quantization.gemm import device_kernel

    prompts = job["prompts"]
    llm = start(
        model,
        variant,
        in_process=True,
        enforce_eager=True,
        max_model_len=max(map(len, prompts)) + job["tokens"] + 1,  # scoring asks for one token more
        max_num_batched_tokens=4096,
        max_num_seqs=256,
        gpu_memory_utilization=job["gpu_memory_utilization"],
    )
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": job["vocab_size"]})  # as verl's server does
    params = SamplingParams(
        temperature=1.0, max_tokens=job["tokens"], logprobs=0, stop_token_ids=job["stop_token_ids"], detokenize=False
    )
    outputs = [
        result.outputs[0]
        for result in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    ]
    responses = [list(output.token_ids) for output in outputs]
    own = [[step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
    # vLLM's prompt log-probs are of the raw logits, which at temperature 1 without top-k or top-p are the processed.
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def scored(responses: Tokens) -> LogProbs:
        whole = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        results = llm.generate([{"prompt_token_ids": ids} for ids in whole], params, use_tqdm=False)
        return [
            [result.prompt_logprobs[i][ids[i]].logprob for i in range(len(prompt), len(ids))]
            for result, prompt, ids in zip(results, prompts, whole, strict=True)
        ]

    again = scored(responses)
    layers = llm.collective_rpc("flashrl_layers")[0]
    fmt = weight_format(formats_of(variant).precision)
    return {
        "responses": responses,
        "own": own,
        "again": again,
        "common": again if job["common"] is None else scored(job["common"]),
        "kernel": "unquantized" if fmt is None else device_kernel(fmt).value,
        "quantized_layers": layers["quantized_layers"],
        "unquantized": list(layers["unquantized_layers"]),
    }


# ---- the trainer's side ----


class Trainer:
    """A Hugging Face model that gives log-probs as verl's FSDP engine does, without FSDP.

    Args:
        model: folder of the checkpoint.
    """

    def __init__(self, model: str):
        from transformers import AutoModelForCausalLM

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.module = loaded.to(self.device).eval()

    def linear_layers(self, skipped: Collection[str]) -> list[tuple[str, torch.nn.Linear]]:
        """Those of decoder layers that engines quantize; packed experts are none."""
        return [
            (name, module)
            for name, module in self.module.named_modules()
            if isinstance(module, torch.nn.Linear) and re.search(r"layers\.\d+\.", name) and name not in skipped
        ]

    @torch.no_grad()
    def log_probs(self, prompts: Tokens, responses: Tokens) -> LogProbs:
        """Log-prob of each token of the responses, given the prompts."""
        from verl.utils.torch_functional import logprobs_from_logits

        whole = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        room, found = max(1, LOGIT_BYTES // (4 * self.module.config.vocab_size)), [[] for _ in whole]
        order = sorted(range(len(whole)), key=lambda i: len(whole[i]))
        while order:
            size = max(1, min(len(order), room // len(whole[order[-1]])))
            batch, order = order[-size:], order[:-size]
            ids, mask = self.padded([whole[i] for i in batch])
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                logits = self.module(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
                values = logprobs_from_logits(logits[:, :-1], ids[:, 1:])
            for row, i in zip(values.double().tolist(), batch, strict=True):
                start = len(prompts[i]) - 1  # position t predicts token t + 1
                found[i] = row[start : start + len(responses[i])]
        return found

    def padded(self, rows: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, T], padded on the right, and the mask [B, T] bool of what is real."""
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        return ids.to(self.device), mask.to(self.device)

    @torch.no_grad()
    def noise(self, sequences: Tokens, precisions: list[str], skipped: set[str]) -> dict[str, list[dict[str, Any]]]:
        """Signal-to-quantization-noise ratios in dB, by precision and type of layer: of the weights (codes times scales
        against BF16) and of the outputs (the emulated W8A8 product against the exact one), median over matrices.

        Args:
            sequences: tokens whose activations are used; they run as one batch.
            precisions: 8-bit ones.
            skipped: layers that the engines keep in BF16.
        """
        from flashrl_verl.quantization.formats import weight_format
        from flashrl_verl.quantization.gemm import emulated_multiply
        from flashrl_verl.quantization.numerics import quantize_rows, sqnr_db
        from flashrl_verl.settings import Precision

        ids, mask = self.padded(sequences)
        found: dict[str, dict[str, list[tuple[float, float]]]] = {precision: {} for precision in precisions}

        def measure(name: str, module: torch.nn.Linear, inputs: torch.Tensor) -> None:
            weight = module.weight
            real = inputs.reshape(-1, inputs.shape[-1])[mask.flatten()].to(weight.dtype)
            # Outside the autocast of the forward pass, which would round these products to BF16.
            with torch.autocast(self.device.type, enabled=False):
                exact = real.double() @ weight.double().t()
                for precision in precisions:
                    fmt = weight_format(Precision(precision))
                    codes, scales = quantize_rows(weight, fmt)
                    ratios = (
                        float(sqnr_db(weight, codes.double() * scales.double())),
                        float(sqnr_db(exact, emulated_multiply(real, codes, scales, fmt))),
                    )
                    found[precision].setdefault(name.rpartition(".")[2], []).append(ratios)

        handles = [
            module.register_forward_pre_hook(lambda m, arguments, name=name: measure(name, m, arguments[0]))
            for name, module in self.linear_layers(skipped)
        ]
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            self.module(input_ids=ids, attention_mask=mask.long(), use_cache=False)
        for handle in handles:
            handle.remove()

        def median(of: list[tuple[float, float]], part: int) -> dict[str, float]:
            return {"median": statistics.median(pair[part] for pair in of)}

        return {
            precision: [
                {"kind": kind, "matrices": len(of), "weight": median(of, 0), "output": median(of, 1)}
                for kind, of in kinds.items()
            ]
            for precision, kinds in found.items()
        }


def compare(trainer: LogProbs, rollout: LogProbs) -> dict[str, float]:
    """Compare log-probs of the same responses by verl's own functions, in float64: ``exp(d) - d - 1`` is about d^2 / 2,
    of which float32 would lose most digits.

    Returns:
        verl's ``rollout_corr/*`` and ``training/rollout_*`` metrics (effective sample size: of TIS a token, cap 2),
        ``tokens``, ``responses``, and ``k3_kl_standard_error``, for which responses are the independent draws.
    """
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_rollout_corr_metrics_from_logprobs,
        compute_rollout_correction_weights,
    )
    from verl.utils.debug.metrics import calculate_debug_metrics

    lengths = torch.tensor([len(row) for row in trainer])
    assert lengths.tolist() == [len(row) for row in rollout], "log-probs are of different tokens"
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
    old, other = (torch.zeros(mask.shape, dtype=torch.float64) for _ in range(2))
    for target, rows in ((old, trainer), (other, rollout)):
        target[mask] = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    d = old - other
    sums, total = ((d.expm1() - d) * mask).sum(-1), lengths.sum()
    residuals = sums - sums.sum() / total * lengths  # of a ratio of sums, linearized
    rows = len(trainer)
    error = float((residuals.square().sum() * rows / (rows - 1)).sqrt() / total) if rows > 1 else math.nan
    _, weights = compute_rollout_correction_weights(d * mask, mask.double(), "token", 2.0)
    tensors = {"old_log_probs": old, "rollout_log_probs": other, "response_mask": mask, "responses": mask.long()}
    return {
        "tokens": int(total),
        "responses": rows,
        "k3_kl_standard_error": error,
        ESS: float(weights["rollout_is_eff_sample_size"]),
        **compute_rollout_corr_metrics_from_logprobs(old, other, mask),
        **calculate_debug_metrics(DataProto.from_dict(tensors=tensors)),
    }


# ---- the command ----


def prompts_of(model: str, data: Path | None, count: int, seed: int) -> dict[str, Any]:
    """Prompts as tokens, what ends a response, and the tokenizer's length.

    Raises:
        ConfigError: there is no chat template, or the file is not in verl's format.
    """
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    if not tokenizer.chat_template:
        raise ConfigError(f"--model {model}: its tokenizer has no chat template; take an instruction-tuned model")
    if data is None:
        from flashrl_verl.quickstart.task import TaskConfig, split_problems

        problems = split_problems(TaskConfig(), seed=seed).train
        asked = [[{"role": "user", "content": problem.prompt}] for problem in problems]
    else:
        import pyarrow.parquet

        try:
            asked = pyarrow.parquet.read_table(data, columns=["prompt"]).column("prompt").to_pylist()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--data {data} is no parquet file with verl's column `prompt`: {error}") from error
        random.Random(seed).shuffle(asked)
    texts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for messages in itertools.islice(itertools.cycle(asked), count)
    ]
    stops = {tokenizer.eos_token_id}
    if (Path(model) / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(model).eos_token_id
        stops |= set(ids if isinstance(ids, list) else [ids])
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return {"prompts": tokens, "stop_token_ids": sorted(stops - {None}), "vocab_size": len(tokenizer)}


def mismatch(
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face folder in high precision; toy: the quickstart's model, made here; or a name such as "
            "qwen2.5-0.5b: random weights."
        ),
    ] = "toy",
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers of random weights.")] = None,
    variants: Annotated[
        str, typer.Option(help="precision[+int8kv], separated by commas; bf16 is measured in any case.")
    ] = "int8,fp8",
    prompts: Annotated[int, typer.Option(min=2, help="Prompts, one sampled response each.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 64,
    data: Annotated[Path | None, typer.Option(help="Parquet file in verl's format; else the toy's additions.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM's share of the GPU.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts and the toy model.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for mismatch.json and logs.")] = Path("outputs/mismatch"),
) -> None:
    """Compare the rollout's log-probs with the trainer's, by variant, and say where the difference arises."""
    from benchmarks.engine import formats_of
    from flashrl_verl.tools.engines.shapes import SHAPES, load_config

    names = ["bf16", *(name for name in words_of(variants, option="--variants") if name != "bf16")]
    formats = {name: formats_of(name) for name in names}
    if layers and model not in SHAPES:
        raise ConfigError(f"--layers {layers} is of random weights, and --model {model} is none of {', '.join(SHAPES)}")
    output = output.expanduser().resolve()
    if model == "toy":
        from flashrl_verl.quickstart.assets import AssetsConfig, make_assets

        print("toy model: supervised warm-up", flush=True)
        folder = str(make_assets(output / "assets", AssetsConfig(seed=seed)).model)
    elif (Path(model) / "config.json").is_file():
        folder = str(Path(model).resolve())
    elif model in SHAPES:
        layers = layers or load_config(model).num_hidden_layers
        folder = str(output / f"{model}-{layers}")
        make_model(model, layers, Path(folder))
    else:
        raise ConfigError(
            f"--model {model} is neither toy, a folder with a config.json, nor one of {', '.join(SHAPES)}"
        )
    job = prompts_of(folder, data, prompts, seed)
    job |= {"tokens": tokens, "gpu_memory_utilization": gpu_memory_utilization, "common": None}
    answers = {}
    for name in names:
        print(f"{name}: started", flush=True)
        answers[name] = in_own_process(sample, folder, name, job, log=output / f"{name}.log")
        job["common"] = job["common"] or answers[name]["responses"]
    print("trainer: log-probs, and noise of every layer", flush=True)
    trainer = Trainer(folder)
    common = trainer.log_probs(job["prompts"], job["common"])
    whole = [[*p, *r] for p, r in zip(job["prompts"], job["common"], strict=True)]
    few = [row for row, end in zip(whole, itertools.accumulate(map(len, whole)), strict=True) if end <= NOISE_TOKENS]
    precisions = list(dict.fromkeys(f.precision.value for f in formats.values() if f.precision.value != "bf16"))
    skipped = set.intersection(*(set(answers[name]["unquantized"]) for name in names))
    noise = trainer.noise(few or whole[:1], precisions, skipped) if precisions else {}
    results = []
    for name, answer in answers.items():
        theirs = common if name == "bf16" else trainer.log_probs(job["prompts"], answer["responses"])
        results.append(
            {
                "variant": name,
                "precision": formats[name].precision.value,
                "kv_cache": formats[name].kv_cache.value,
                "kernels": {"linear": answer["kernel"]},
                "quantized_layers": answer["quantized_layers"],
                "own": compare(theirs, answer["own"]),
                "common": compare(common, answer["common"]),
                "own_again": compare(answer["again"], answer["own"]),
                "noise": noise.get(formats[name].precision.value, []),
            }
        )
    here = environment()
    record = {"model": model, "layers": layers, "prompts": str(data or "additions of the toy task")}
    record["device"] = here["device"]
    write_json(output / "mismatch.json", record | {"versions": here, "seed": seed, "results": results})
    rows = [
        [
            one["variant"],
            *(f"{one[s][K3_KL]:.1e} ± {one[s]['k3_kl_standard_error']:.0e}" for s in ("own", "common", "own_again")),
            f"{one['common'][PROBS_DIFF]:.2e}",
            f"{one['common'][CORRELATION]:.5f}",
        ]
        for one in results
    ]
    show(
        f"Mismatch of {model} on {here['device']}",
        (
            "variant",
            *("k3 KL, own tokens", "common tokens", "own, engine again"),
            *("probs diff", "correlation"),
        ),
        rows,
    )
    for precision, kinds in noise.items():
        header = ("layer", "weight dB", "output dB")
        rows = [[k["kind"], f"{k['weight']['median']:.1f}", f"{k['output']['median']:.1f}"] for k in kinds]
        show(f"Signal to quantization noise, {precision}", header, rows)
    print(f"written: {output / 'mismatch.json'}")


if __name__ == "__main__":
    run(mismatch)
