# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with less Python for a token, which bounds engines of small models.

vLLM's engine sends every token of every request to the server's process at once, with three small arrays of its
log-prob. To unpack them takes the server 36 µs a token, so that no engine returns more than about 25,000 tokens a
second. A request that is answered as a whole has no use for that: sixteen tokens at a time cost 3 µs each.

vLLM's scheduler also looks for room in the KV cache, and for pages to share, at every token. Of 16 tokens in a page one
needs it and one fills it.
"""

import operator
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

NAME = f"{__name__}.scheduler"
"""vLLM's ``--scheduler-cls``."""
TOKENS = 16
"""Of a bundle. An aborted request loses those that wait, at most one less."""
_ALONE = "new_prompt_logprobs_tensors pooling_output events prefill_stats routed_experts new_sampling_mask".split()
_alone = operator.attrgetter(*(name for name in _ALONE if name in EngineCoreOutput.__struct_fields__))
_NOTHING = _alone(EngineCoreOutput("", []))
"""An output with more than this does not wait."""


class _Pages(KVCacheManager):
    """vLLM's, for one group of full attention."""

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **others: Any
    ) -> KVCacheBlocks | None:
        """vLLM's, which has nothing to do for tokens of a running request that neither need a page nor fill one."""
        if not others and not num_lookahead_tokens:
            of, name = self.coordinator.single_type_managers[0], request.request_id
            tokens = request.num_computed_tokens + num_new_tokens
            all_shared = not self.enable_caching or tokens // of.block_size <= of.num_cached_block.get(name, 0)
            if all_shared and tokens <= len(of.req_to_blocks.get(name, ())) * of.block_size:
                return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **others)


class _Bundles:
    """Before vLLM's scheduler in the order of classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: dict[str, tuple[list[int], list[LogprobsLists]]] = {}
        """Tokens and log-probs of a request that are not sent yet."""
        pages = self.kv_cache_manager
        kinds = [type(pages), *map(type, pages.coordinator.single_type_managers)]
        if kinds == [KVCacheManager, FullAttentionManager]:
            pages.__class__ = _Pages

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """vLLM's, with the outputs that are due."""
        of_clients = super().update_from_output(*args, **kwargs)
        for sent in of_clients.values():
            sent.outputs = [output for output in sent.outputs if self._is_due(output)]
        return of_clients

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's. What was aborted waits no longer."""
        finished = super().finish_requests(*args, **kwargs)
        for request in self._waiting.keys() - self.requests.keys():
            del self._waiting[request]
        return finished

    def _is_due(self, output: EngineCoreOutput) -> bool:
        """Puts what waits of the request before it, if so. Every token comes here: a microsecond is 3 % of a step."""
        waits = output.finish_reason is None and _alone(output) == _NOTHING
        if (found := self._waiting.get(output.request_id)) is None:
            if waits := waits and self._may_wait(output):
                logprobs = [] if output.new_logprobs is None else [output.new_logprobs]
                self._waiting[output.request_id] = output.new_token_ids, logprobs
            return not waits
        tokens, logprobs = found
        tokens += output.new_token_ids
        if output.new_logprobs is not None:
            logprobs.append(output.new_logprobs)
        if waits and len(tokens) < TOKENS:
            return False
        del self._waiting[output.request_id]
        output.new_token_ids = tokens
        if logprobs:
            output.new_logprobs = LogprobsLists(*map(np.concatenate, zip(*(of[:3] for of in logprobs), strict=True)))
        return True

    def _may_wait(self, output: EngineCoreOutput) -> bool:
        params = self.requests[output.request_id].sampling_params
        # The server looks for stop strings, in the text.
        return params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop


class _BundlingAsyncScheduler(_Bundles, AsyncScheduler):
    pass


class _BundlingScheduler(_Bundles, Scheduler):
    pass


def scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
    """What vLLM makes of ``--scheduler-cls``, asynchronous as the configuration says."""
    kind = _BundlingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else _BundlingScheduler
    return kind(vllm_config, *args, **kwargs)
