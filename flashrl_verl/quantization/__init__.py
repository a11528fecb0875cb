# SPDX-License-Identifier: Apache-2.0
"""Quantize on load: BF16 shards become 8-bit codes while vLLM loads them. Start reading at ``numerics.py``."""
