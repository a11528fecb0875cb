# SPDX-License-Identifier: Apache-2.0
"""The dtype in which a weight reaches the rollout: of an update (``sender.py``, ``load.py``), of an export."""

import re

import torch

_ROUTER = re.compile(r"(^|\.)(gate|router)(\.|$)|(^|\.)(e_score_correction_bias|expert_bias)$")
"""Names of what MoE routers choose experts by, which keeps the trainer's precision (verl sends routers in FP32 for the
same reason). vLLM holds some in FP32 (GLM-4-MoE, Ernie-4.5-MoE, AFMoE): biases of about 30 that differ by 0.02 are one
in BF16, and other experts are chosen. Not all of those biases lie in a module called gate:
``mlp.moe_statics.e_score_correction_bias`` in Ernie-4.5, ``mlp.expert_bias`` in AFMoE. Where vLLM holds them in BF16
(Qwen3-MoE) its loader rounds them."""


def wire_dtype(name: str, found: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor reaches the rollout.

    Args:
        name: in a Hugging Face checkpoint.
        found: the tensor's dtype.
        dtype: the rollout's.

    Returns:
        ``dtype``; the tensor's own where it is a router's or not floating.
    """
    return found if not found.is_floating_point or _ROUTER.search(name) else dtype
