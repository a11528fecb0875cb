# SPDX-License-Identifier: Apache-2.0
"""What our attention over INT8 keys and values does not have is refused with the way out."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "given, said",
    [
        ({"alibi_slopes": [0.5]}, "no ALiBi"),
        ({"sliding_window": 4096}, "no sliding window"),
        ({"logits_soft_cap": 30.0}, "no cap on logits"),
        ({"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"}, "no KV cache that layers share"),
        ({"sinks": True}, "no sinks"),
    ],
)
def test_layers_of_another_kind_are_refused_with_a_remedy(given, said):
    from flashrl_verl.attention.backend import Int8KVAttention
    from flashrl_verl.attention.limits import REMEDY

    with pytest.raises(ValueError, match=f"flashrl.kv_cache=int8_per_token_head: its attention has {said}") as refused:
        Int8KVAttention(8, 128, 128**-0.5, 4, **given)
    assert REMEDY in str(refused.value)
