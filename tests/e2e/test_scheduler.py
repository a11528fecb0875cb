# SPDX-License-Identifier: Apache-2.0
"""Tokens in bundles are the tokens and log-probs that vLLM sends one by one; an abort ends what waits. What the KV
cache is not asked would change nothing. A cache that is cleared keeps no keys, whatever runs."""

import asyncio
import random
from collections import Counter

import pytest
from engines import engine
from tiny_models import make
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from flashrl_verl.rollout import scheduler

pytestmark = pytest.mark.timeout(300)

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8 + i]} for i in range(4)]
TOKENS = 45


def answers(llm, sent: list[int]):
    """Token ids, log-probs and finish reasons; ``sent`` gets the number of tokens of every output of the engine's."""
    core = llm.llm_engine.engine_core
    get = type(core).get_output

    def counted():
        outputs = get(core)
        sent.extend(len(output.new_token_ids) for output in outputs.outputs)
        return outputs

    core.get_output = counted
    params = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS - i, logprobs=0, detokenize=False)
        for i in range(len(PROMPTS))
    ]
    found = [request.outputs[0] for request in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [
        (o.token_ids, [at[t].logprob for t, at in zip(o.token_ids, o.logprobs, strict=True)], o.finish_reason)
        for o in found
    ]


def test_bundles_hold_what_vllm_sends_one_by_one_and_nothing_after_an_abort(tmp_path):
    make("llama3", 0).config.save_pretrained(tmp_path)
    one_by_one, bundled = [], []
    with engine(tmp_path, {"precision": "bf16"}, max_num_seqs=3) as llm:
        expected = answers(llm, one_by_one)
    with engine(tmp_path, {"precision": "bf16"}, max_num_seqs=3, scheduler_cls=scheduler.NAME) as llm:
        assert answers(llm, bundled) == expected
        assert max(one_by_one) == 1 and sum(one_by_one) == sum(bundled)
        assert max(bundled) == scheduler.TOKENS and len(bundled) <= len(PROMPTS) * (2 + TOKENS // scheduler.TOKENS)
        core = llm.llm_engine.engine_core.engine_core
        asynchronous = core.vllm_config.scheduler_config.async_scheduling  # on a GPU
        assert isinstance(core.scheduler, AsyncScheduler) == asynchronous
        for i, prompt in enumerate(PROMPTS):
            endless = SamplingParams(
                max_tokens=100, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )
            llm.llm_engine.add_request(str(i), prompt, endless)
        for _ in range(5):
            llm.llm_engine.step()
        assert len(core.scheduler._waiting) == 3
        core.scheduler.finish_requests(None, core.scheduler.running[0].status.FINISHED_ABORTED)
        assert not core.scheduler._waiting


def compared_with_vllms(monkeypatch) -> Counter:
    """How often vLLM's KV cache manager is asked (True) and not; where not, it is too, and has to do nothing."""
    asked, ours, vllms = Counter(), scheduler._Pages.allocate_slots, KVCacheManager.allocate_slots

    def state(pages):
        (of,) = pages.coordinator.single_type_managers
        of_requests = {n: [(b.block_id, b.block_hash, b.ref_cnt) for b in bs] for n, bs in of.req_to_blocks.items()}
        return of_requests, dict(of.num_cached_block), pages.block_pool.get_num_free_blocks()

    def counted(*args, **others):
        asked[True] += 1
        return vllms(*args, **others)

    def both(pages, *args, **others):
        before, count = state(pages), asked[True]
        found = ours(pages, *args, **others)
        if asked[True] == count:
            asked[False] += 1
            assert vllms(pages, *args, **others) is found and state(pages) == before
        return found

    monkeypatch.setattr(KVCacheManager, "allocate_slots", counted)
    monkeypatch.setattr(scheduler._Pages, "allocate_slots", both)
    return asked


def run(core, kind: type, caching: bool) -> Counter:
    """A scheduler like the engine's, with tokens by chance: prompts that share pages, more requests than the cache
    holds, aborts. Events by name."""
    config, cache = core.vllm_config, core.scheduler.kv_cache_config
    config.cache_config.enable_prefix_caching = caching
    plan = kind(config, cache, core.structured_output_manager, core.scheduler.block_size)
    assert type(plan.kv_cache_manager) is scheduler._Pages
    draw, behind, seen = random.Random(0), [], Counter()
    for i in range(24):
        prompt = [3 + i % 4] * (40 if i % 3 else 4) + [5] * draw.randrange(20)
        params = SamplingParams(max_tokens=draw.randrange(1, 180), ignore_eos=True, detokenize=False)
        hasher = core.request_block_hasher if caching else None
        plan.add_request(Request(str(i), prompt, params, None, block_hasher=hasher))
    while plan.requests:
        step = plan.schedule()
        seen["steps"] += 1
        seen["preempted"] += len(step.preempted_req_ids or ())
        seen["cached"] += sum(new.num_computed_tokens for new in step.scheduled_new_reqs)
        names = list(step.num_scheduled_tokens)
        tokens = [[] if plan.requests[name].is_prefill_chunk else [draw.randrange(3, 9)] for name in names]
        behind.append((step, names, tokens))
        if len(behind) > (kind is scheduler._BundlingAsyncScheduler):
            step, names, tokens = behind.pop(0)
            output = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={n: i for i, n in enumerate(names)},
                sampled_token_ids=tokens,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            )
            plan.update_from_output(step, output)
        if seen["steps"] % 20 == 0 and plan.running:
            plan.finish_requests(plan.running[0].request_id, RequestStatus.FINISHED_ABORTED)
            seen["aborted"] += 1
    assert plan.kv_cache_manager.block_pool.get_num_free_blocks() == cache.num_blocks - 1
    return seen


def test_what_the_kv_cache_is_not_asked_would_change_nothing(tmp_path, monkeypatch):
    make("llama3", 0).config.save_pretrained(tmp_path)
    sizes = dict(
        max_num_seqs=12, max_model_len=256, max_num_batched_tokens=40, num_gpu_blocks_override=30, block_size=32
    )
    with engine(tmp_path, {"precision": "bf16"}, **sizes) as llm:
        for kind in scheduler._BundlingScheduler, scheduler._BundlingAsyncScheduler:
            for caching in True, False:
                asked = compared_with_vllms(monkeypatch)
                seen = run(llm.llm_engine.engine_core.engine_core, kind, caching)
                assert seen["preempted"] and seen["aborted"] and bool(seen["cached"]) == caching
                assert asked[False] > 5 * asked[True] > 0
                monkeypatch.undo()


async def cached_after_clearing(path) -> tuple[int, int]:
    """Tokens of a prompt in the prefix cache before and after, while another request runs."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from flashrl_verl.rollout.server import FlashRLHttpServer

    settings = dict(skip_tokenizer_init=True, load_format="dummy", enforce_eager=True)
    server = object.__new__(FlashRLHttpServer)
    server.node_rank, server.engine = 0, AsyncLLM.from_engine_args(AsyncEngineArgs(str(path), **settings))

    async def ask(name: str, first: int, tokens: int) -> int:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = []
        async for output in server.engine.generate({"prompt_token_ids": [first, *[7] * 140]}, params, name):
            outputs.append(output)
            started.set()
        return outputs[-1].num_cached_tokens

    started = asyncio.Event()
    try:
        await ask("first", 3, 1)
        started.clear()
        runs = asyncio.ensure_future(ask("runs", 4, 100))
        await started.wait()
        before = await ask("second", 3, 1)
        await server.clear_kv_cache()
        assert not runs.done()
        return before, await ask("third", 3, 1)
    finally:
        server.engine.shutdown()


def test_a_cleared_cache_keeps_no_keys_while_a_request_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    make("llama3", 0).config.save_pretrained(tmp_path)
    before, after = asyncio.run(cached_after_clearing(tmp_path))
    assert before > 0 == after
