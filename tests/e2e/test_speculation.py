# SPDX-License-Identifier: Apache-2.0
"""n-gram speculation, whose drafts are taken from the sequence itself: log-probs are the policy's, of accepted and of
corrected tokens."""

import pytest
import torch
from engines import Refit, engine, teacher_forced
from tiny_models import VOCAB, make, wire

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8"])
def test_log_probs_of_drafted_tokens_are_the_policys(tmp_path, precision):
    pytest.importorskip("numba", reason="vLLM's n-gram proposer needs it")
    from vllm import SamplingParams

    model = make("llama3", 0)
    with torch.no_grad():  # tied: a token is its own likely successor, so that drafts are often right, not always
        model.get_input_embeddings().weight.mul_(3)
    model.config.save_pretrained(tmp_path)
    prompts = torch.randint(3, VOCAB, (32, 8), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=1.0, max_tokens=40, logprobs=0, ignore_eos=True, detokenize=False, seed=0)
    with engine(tmp_path, {"precision": precision}, speculative_config=NGRAM, disable_log_stats=False) as llm:
        Refit(llm)(wire(model), 0)
        answers = [
            r.outputs[0] for r in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        ]
        counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafted = counts["vllm:spec_decode_num_draft_tokens"]
    accepted = counts["vllm:spec_decode_num_accepted_tokens"]
    with engine(tmp_path, {"precision": precision}) as llm:
        Refit(llm)(wire(model), 0)
        whole = teacher_forced(llm, [p + list(answer.token_ids) for p, answer in zip(prompts, answers, strict=True)])
    ours = torch.tensor([[at[t].logprob for t, at in zip(a.token_ids, a.logprobs, strict=True)] for a in answers])
    known = torch.tensor([of_all[-ours.shape[1] :] for of_all in whole])
    assert 0.1 * drafted < accepted < 0.95 * drafted
    assert known.mean() < -0.1, "the policy is not certain, so that a draft's log-prob of 0 would be told apart"
    assert (ours - known).abs().max() < 0.2 and (ours - known).abs().mean() < 0.02
