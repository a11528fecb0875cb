# SPDX-License-Identifier: Apache-2.0
"""After a weight update an engine has forgotten the keys and values of the weights before, or nothing is measured."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from flashrl_verl.errors import FlashRLError
from flashrl_verl.tools.engines.child import drop_prefix_cache


def test_a_prefix_cache_that_is_still_in_use_is_an_error():
    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)  # what answers `LLM.reset_prefix_cache`
    drop_prefix_cache(pool)
    held = pool.get_new_blocks(1)
    with pytest.raises(FlashRLError, match="did not reset its prefix cache"):
        drop_prefix_cache(pool)
    pool.free_blocks(held)
    drop_prefix_cache(pool)
