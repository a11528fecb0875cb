# SPDX-License-Identifier: Apache-2.0
"""How far the rollout's policy is from the trainer's, by variant, for a pretrained model and real problems.

    python -m benchmarks.mismatch --model /shared/models/Qwen2.5-7B-Instruct --data gsm8k/test.jsonl
    python -m benchmarks.mismatch ... --variants int8,fp8 --context 8000 --prompts 128

One vLLM engine after another, BF16 first, gets the model's weights as a run sends them and samples at temperature 1.
The trainer's side is the Hugging Face model with BF16 weights under autocast to BF16, as verl's FSDP engine computes,
and verl's own function of log-probs. Two sets of tokens are compared: each engine's own samples, which is what a run
logs, and the BF16 engine's samples scored by all of them. Engines run eagerly, without CUDA graphs.

Variants: ``bf16``; ``int8`` and ``int8-unrotated``; ``fp8`` (a scale a row and token); ``fp8-verl``, verl's own FP8
rollout (128 x 128 blocks; on a GPU). An INT8 KV cache may follow: ``+int8kv``.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import environment, in_own_process, run, show, words_of, write_json
from flashrl_verl.errors import ConfigError

VARIANTS = "int8,int8-unrotated,fp8,fp8-verl"
K3_KL = "rollout_corr/k3_kl"
CORRELATION = "training/rollout_actor_probs_pearson_corr"
ESS = "rollout_corr/rollout_is_eff_sample_size"
LOGIT_BYTES = 1 << 30
"""Room for the logits of one batch of the trainer's."""

Tokens = list[list[int]]
LogProbs = list[list[float]]

# ---- the engine ----


def sample(model: str, variant: str, job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, sample a response to each prompt, and score the common ones (None: its own)."""
    from vllm import SamplingParams

    from benchmarks.engine import start

    prompts = job["prompts"]
    llm = start(
        model,
        variant,
        in_process=job["tensor_parallel"] == 1,
        fp32_lm_head=job["fp32_lm_head"],
        enforce_eager=True,
        tensor_parallel_size=job["tensor_parallel"],
        max_model_len=job["max_model_len"] or max(map(len, prompts)) + job["tokens"] + 1,  # one more to score the last
        max_num_batched_tokens=2048,  # scoring keeps as many rows of logits, several times
        max_num_seqs=256,
        gpu_memory_utilization=job["gpu_memory_utilization"],
    )
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": job["vocab_size"]})  # as verl's server does
    params = SamplingParams(
        temperature=1.0, max_tokens=job["tokens"], logprobs=0, stop_token_ids=job["stop_token_ids"], detokenize=False
    )
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    outputs = [result.outputs[0] for result in results]
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

    common = scored(job["common"] or responses)
    layers = llm.collective_rpc("flashrl_layers")[0]["quantized_layers"]
    return {"responses": responses, "own": own, "common": common, "quantized_layers": layers}


# ---- the trainer's side ----


class Trainer:
    """A Hugging Face model that gives log-probs as verl's FSDP engine does, without FSDP.

    Args:
        model: folder of the checkpoint.
        fp32_lm_head: compute logits in FP32.
    """

    def __init__(self, model: str, fp32_lm_head: bool):
        from transformers import AutoModelForCausalLM

        from flashrl_verl.fp32_head import compute_head_in_fp32

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.module = loaded.to(self.device).eval()
        if fp32_lm_head:
            compute_head_in_fp32(self.module)

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
            torch.cuda.empty_cache()  # batches differ in shape, and an engine starts beside it
        return found

    def padded(self, rows: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, T], padded on the right, and the mask [B, T] bool of what is real."""
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        return ids.to(self.device), mask.to(self.device)


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


def prompts_of(model: str, data: Path, count: int, context: int, seed: int) -> dict[str, Any]:
    """Prompts as tokens, what ends a response, and the tokenizer's length.

    Args:
        model: folder with the tokenizer.
        data: see ``mismatch``.
        count: prompts.
        context: tokens that solved problems fill before each question, about.
        seed: of the choice of problems.

    Raises:
        ConfigError: there is no chat template, or the file has another form.
    """
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    if not tokenizer.chat_template:
        raise ConfigError(f"--model {model}: its tokenizer has no chat template; take an instruction-tuned model")
    try:
        rows = [json.loads(line) for line in data.read_text().splitlines()]
        problems = [(row["question"], row["answer"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--data {data} has no lines like GSM8K's ({type(error).__name__}: {error})") from error
    draw = random.Random(seed)
    draw.shuffle(problems)

    def tokens_of(solved: list[tuple[str, str]], question: str) -> list[int]:
        messages = []
        for before, answer in solved:
            messages += [{"role": "user", "content": before}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)

    some = problems[:32]
    before = int(context / (len(tokens_of(some, "")) / len(some)))
    prompts = []
    for question, answer in itertools.islice(itertools.cycle(problems), count):
        others = [problem for problem in problems if problem != (question, answer)]
        prompts.append(tokens_of(draw.sample(others, min(len(others), before)), question))
    stops = {tokenizer.eos_token_id}
    if (Path(model) / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(model).eos_token_id
        stops |= set(ids if isinstance(ids, list) else [ids])
    return {"prompts": prompts, "stop_token_ids": sorted(stops - {None}), "vocab_size": len(tokenizer)}


def far_off(of: dict[str, Any]) -> str:
    """k3 KL and its standard error."""
    return f"{of[K3_KL]:.1e} ± {of['k3_kl_standard_error']:.0e}"


def table(records: Iterable[dict[str, Any]]) -> list[list[str]]:
    """Distance of every engine from the trainer; its excess over BF16's as a share of that of each FP8. Header
    first."""
    rows = [["model", "variant", "k3 KL, own", "k3 KL, common", "excess / fp8's", "/ fp8-verl's", "correlation", "ESS"]]
    for record in records:
        of = {one["variant"]: one for one in record["results"]}
        excess = {name: one["own"][K3_KL] - of["bf16"]["own"][K3_KL] for name, one in of.items()}
        for name, one in of.items():
            shares = [
                f"{excess[name] / excess[fp8]:.2f}" if name != "bf16" and fp8 in of else "-"
                for fp8 in ("fp8", "fp8-verl")
            ]
            near = f"{one['own'][CORRELATION]:.5f}", f"{one['own'][ESS]:.4f}"
            rows.append([record["model"], name, far_off(one["own"]), far_off(one["common"]), *shares, *near])
    return rows


def mismatch(
    model: Annotated[str, typer.Option(help="A Hugging Face folder in high precision, with a chat template.")],
    data: Annotated[Path, typer.Option(help="Problems as GSM8K publishes them: JSON lines with question and answer.")],
    variants: Annotated[str, typer.Option(help="Perhaps with +int8kv; bf16 is measured in any case.")] = VARIANTS,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts, one sampled response each.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 512,
    context: Annotated[int, typer.Option(min=0, help="Tokens of solved problems before each question.")] = 0,
    max_model_len: Annotated[int | None, typer.Option(help="vLLM's; the prompts' and responses' otherwise.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of an engine.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM's share of the GPU.")] = 0.5,
    fp32_lm_head: Annotated[bool, typer.Option("--fp32-lm-head", help="Logits in FP32 on both sides.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of problems.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for mismatch.json and logs.")] = Path("outputs/mismatch"),
) -> None:
    """Compare the rollout's log-probs with the trainer's, by variant."""
    from benchmarks.engine import FP8_VERL, formats_of

    names = ["bf16", *(name for name in words_of(variants, option="--variants") if name != "bf16")]
    for name in names:
        formats_of(name)
    if fp32_lm_head and FP8_VERL in names:
        raise ConfigError(f"--fp32-lm-head: {FP8_VERL} is verl's, which has no such logits. Name other --variants")
    folder, output = str(Path(model).expanduser().resolve()), output.expanduser().resolve()
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"--model {model} is no folder with a config.json: download the model, and give its folder")
    job = prompts_of(folder, data, prompts, context, seed)
    of_model = json.loads((Path(folder) / "config.json").read_text()).get("max_position_embeddings", math.inf)
    if (longest := max(map(len, job["prompts"])) + tokens + 1) > (room := max_model_len or of_model):
        raise ConfigError(f"prompts and --tokens need {longest} positions, and the engine has {room}: lower --context")
    job |= {"tokens": tokens, "gpu_memory_utilization": gpu_memory_utilization, "common": None}
    job |= {"tensor_parallel": tensor_parallel, "max_model_len": max_model_len, "fp32_lm_head": fp32_lm_head}
    here = environment()
    record = {"model": Path(folder).name, "context": context, "device": here["device"], "versions": here, "seed": seed}
    record |= {"tensor_parallel": tensor_parallel, "max_model_len": max_model_len, "fp32_lm_head": fp32_lm_head}
    record["results"] = []
    trainer, common = None, []
    for name in names:
        print(f"{name}: started", flush=True)
        answer = in_own_process(sample, folder, name, job, log=output / f"{name}.log")
        if trainer is None:
            trainer, job["common"] = Trainer(folder, fp32_lm_head), answer["responses"]
            common = trainer.log_probs(job["prompts"], job["common"])
        theirs = common if name == "bf16" else trainer.log_probs(job["prompts"], answer["responses"])
        one = {"variant": name, "own": compare(theirs, answer["own"]), "common": compare(common, answer["common"])}
        record["results"].append(one | {"quantized_layers": answer["quantized_layers"]})
        write_json(output / "mismatch.json", record)
    header, *rows = table([record])
    logits = ", logits in FP32" if fp32_lm_head else ""
    show(f"Mismatch on {here['device']}, {context} tokens of context{logits}", header, rows)
    print(f"written: {output / 'mismatch.json'}")


if __name__ == "__main__":
    run(mismatch)
